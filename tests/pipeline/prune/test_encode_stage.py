"""The encode actor: the right tokens in their order, faults that stay with their video, kernels compiled ahead."""

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.pruners.base import Pruner, Selection
from gstep.types import VisualTokens
from pipeline.cache.cached_video import view_as_bfloat16
from pipeline.cache.writer import VideoItem
from pipeline.errors import VideoFault
from pipeline.prune import encode_stage
from pipeline.prune.batches import pack, unpack_batch
from pipeline.prune.encode_stage import Encoder, EncodeSetup, VideoEncoder
from pipeline.prune.warm_up import compile_meanwhile
from pipeline.rows import make_failed_video
from pipeline.runner.worker_reports import ProgressDelta, Worker
from tests.builders.caches import source_record
from tests.builders.clusters import heartbeats_here
from tests.gstep.synthetic import needs_cuda

FRAMES = np.random.default_rng(0).integers(0, 256, (2, 384, 384, 3), dtype=np.uint8)


def decoded(video_id: str, frames: np.ndarray | None = FRAMES, **more):
    record = source_record(video_id, (2, 196, 64), height=384, width=384, **more)
    return pack([VideoItem(record, frames=frames)])


def in_order(batches):
    """The record and the tokens of each video that the actor gives."""
    return [(video.record, video.kept) for batch in batches for video in unpack_batch(batch)]


def only(batches):
    (video,) = in_order(batches)
    return video


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(EncodeSetup(ModelSource.resolve("tiny"), "gstep", 0.25, device="cpu"))


class OtherTower:
    """A tower some of whose members are others, which ``change`` makes of it."""

    def __init__(self, tower, change) -> None:
        self._tower = tower
        vars(self).update(change(tower))

    def __getattr__(self, name):
        return getattr(self._tower, name)


@dataclass(frozen=True)
class ChangedSetup(EncodeSetup):
    change: Callable = lambda tower: {}

    def encoder(self) -> VideoEncoder:
        return VideoEncoder(self, OtherTower(super().encoder().backbone, self.change))


def changed(change, model: str = "tiny", handle=None, **more) -> Encoder:
    """An encoder of whose tower ``change`` returns the members that are others."""
    return Encoder(ChangedSetup(ModelSource.resolve(model), "gstep", 0.25, device="cpu", change=change, **more), handle)


def encoding(encode, model: str = "tiny", **more) -> Encoder:
    """An encoder whose tower encodes a video by ``encode(tower, frames)``."""
    return changed(lambda tower: {"encode": lambda frames, *_: encode(tower, frames)}, model, **more)


def test_rows_hold_the_selection_in_its_order(encoder):
    record, kept = only(encoder(decoded("v")))
    assert json.loads(record["model_extra"]) == {"grid": [14, 14]}
    assert len(kept.deepstack) == 0 and kept.evidence == {}
    backbone = family_of(ModelSource.resolve("tiny")).load(choose_runtime("cpu", "float32"))
    tokens = backbone.encode(FRAMES).tokens.to(torch.bfloat16)
    expected = gstep.prune(tokens, 0.25)
    order = expected.compute_selection_order()
    assert kept.index.tolist() == expected.index[order].tolist()
    assert kept.rank.tolist() == list(range(98))
    assert kept.tokens.tolist() == expected.tokens[order].view(torch.int16).tolist()
    assert (record["n_frames"], record["tokens_per_frame"], record["hidden_size"]) == (2, 196, 64)
    assert sum(record["kept_per_frame"]) == record["n_tokens"] == 98
    assert json.loads(record["runtime"])["attn_implementation"] == "sdpa"


QWEN_FRAMES = np.random.default_rng(1).integers(0, 256, (5, 96, 160, 3), dtype=np.uint8)  # 3 x 5 tokens of 32 pixels


def qwen3_row(video_id: str = "v"):
    record = source_record(video_id, (5, 15, 64), height=96, width=160, start_s=0.25)
    return pack([VideoItem(record, frames=QWEN_FRAMES)])


@pytest.mark.parametrize("method", ["gstep", "random", "topk", "fps", "uniform", "none"])
def test_deepstack_levels_hold_the_places_of_the_tokens(method):
    source, ratio = ModelSource.resolve("tiny-qwen3-vl"), 1.0 if method == "none" else 0.25
    record, kept = only(Encoder(EncodeSetup(source, method, ratio, seed=3, device="cpu"))(qwen3_row()))
    visual = family_of(source).load(choose_runtime("cpu", "float32")).encode(QWEN_FRAMES)
    places = kept.index.tolist()
    assert len(places) == (45 if method == "none" else 11)  # of 3 x 15, an odd last frame repeated
    assert (places == sorted(places)) == (method in {"uniform", "none"})
    for ours, level_TND in zip(kept.deepstack, visual.deepstack, strict=True):
        assert torch.equal(view_as_bfloat16(ours).view(ours.shape), level_TND.bfloat16().flatten(0, 1)[places])
    assert kept.tokens.tolist() == visual.tokens.bfloat16().flatten(0, 1)[places].view(torch.int16).tolist()
    assert (record["n_frames"], len(record["frame_indices"]), len(record["kept_per_frame"])) == (3, 5, 3)
    extra = json.loads(record["model_extra"])
    assert (extra["grid"], extra["video_grid_thw"], extra["deepstack_levels"]) == ([3, 5], [3, 6, 10], 3)
    assert extra["patch_timestamps"] == [0.0, 0.375, 0.75]  # frames at 0, 1/4, ... 1 s of a clip that starts at 1/4 s


@pytest.mark.parametrize(
    ("values_of", "place", "value", "stage", "said"),
    [
        (lambda visual: visual.tokens, (1, 3, 0), math.nan, "prune", "frame 1, token 3"),
        (lambda visual: visual.deepstack[1], (2, 14, 63), math.inf, "encode", "deepstack level 1"),
    ],
    ids=["tokens", "level"],
)
def test_values_that_are_not_finite_are_an_error_row(values_of, place, value, stage, said):
    def poisoned(tower, frames):
        visual = tower.encode(frames)
        values_of(visual)[place] = value
        return visual

    record, kept = only(encoding(poisoned, "tiny-qwen3-vl")(qwen3_row()))
    assert kept is None
    assert (record["error_class"], record["error_stage"]) == ("internal", stage)
    assert said in record["error_message"]


def test_two_calls_at_a_time_never_compute_at_a_time_and_one_loads_while_the_other_computes(monkeypatch):
    """What Ray Data's threads do: one video's frames are taken up while another is encoded."""
    computing, most, loaded = [], [], threading.Semaphore(0)

    def counted(tower, frames):
        computing.append(1)
        most.append(len(computing))
        if len(most) == 1:
            assert all(loaded.acquire(timeout=30) for _ in range(2)), "the other call waits before it loads"
        computing.pop()
        return tower.encode(frames)

    encoder = encoding(counted)
    load = encoder.encoder._load_frames
    monkeypatch.setattr(encoder.encoder, "_load_frames", lambda frames: [loaded.release(), load(frames)][1])
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(lambda name: only(encoder(decoded(name))), name) for name in "ab"]
        records = [call.result()[0] for call in calls]
    assert [(record["video_id"], record["status"]) for record in records] == [("a", "ok"), ("b", "ok")]
    assert most == [1, 1]


@needs_cuda
def test_videos_that_are_pruned_beside_others_keep_their_tokens_on_a_gpu():
    """Were memory handed to the next video before pruning has read it, the kept tokens would be others."""
    encoder = VideoEncoder(EncodeSetup(ModelSource.resolve("tiny"), "gstep", 0.25, device="cuda"))
    videos = [np.random.default_rng(k).integers(0, 256, (16, 384, 384, 3), dtype=np.uint8) for k in range(6)]
    record = source_record("v", (16, 196, 64), height=384, width=384)
    alone = [encoder.encode_video_alone(record, video).kept for video in videos]
    with ThreadPoolExecutor(3) as pool:
        beside = [*pool.map(lambda k: encoder.encode_video_alone(record, videos[k % 6]).kept, range(60))]
    for k, kept in enumerate(beside):
        assert np.array_equal(kept.index, alone[k % 6].index) and np.array_equal(kept.tokens, alone[k % 6].tokens)


def bundle_of(*names):
    return pack([video for name in names for video in unpack_batch(decoded(name))])


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen3-vl"])
def test_rows_and_tokens_are_those_of_a_video_alone_whoever_shares_its_pass(model):
    """With one that is too short for its record, and one that has failed, in the same bundle."""
    good = decoded if model == "tiny" else qwen3_row
    failed = VideoItem(make_failed_video(source_record("x", (2, 1, 1)), VideoFault("corrupt", "torn")))
    short = unpack_batch(decoded("short", FRAMES[:1]))  # fewer bytes than its record says
    bundle = [*unpack_batch(good("a")), *unpack_batch(good("b")), *short, failed, *unpack_batch(good("c"))]
    process = Encoder(EncodeSetup(ModelSource.resolve(model), "gstep", 0.25, device="cpu", batch_frames=64))
    shared = in_order(process(pack(bundle)))
    alone = [only(process(pack([video]))) for video in bundle]
    assert [record.get("error_class") for record, _ in shared] == [None, None, "internal", "corrupt", None]
    assert shared[2][0]["error_stage"] == "encode"
    times = {"encode_s", "prune_s"}
    for (one, kept), (other, expected) in zip(shared, alone, strict=True):
        assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in other.items() if k not in times}
        assert (kept is None) == (expected is None)
        if kept is not None:
            assert one["encode_s"] > 0 and kept.tokens.tolist() == expected.tokens.tolist()
            assert [a.tolist() for a in kept.deepstack] == [a.tolist() for a in expected.deepstack]


def as_on_a_gpu(together) -> tuple[Encoder, list[int]]:
    """An encoder in which ``together`` makes the tokens of a pass, and the list that gets the sizes of its passes."""
    sizes = []

    def change(tower):
        def encode_together(videos, *_):
            sizes.append(len(videos))
            return together([*map(tower.encode, videos)])

        return {"encode_together": encode_together, "on_cpu": False}

    return changed(change, batch_frames=8), sizes


NO_MEMORY = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def test_a_video_that_does_not_fit_the_memory_may_be_tried_again():
    def full(tower, frames):
        raise NO_MEMORY

    record, _ = only(encoding(full)(bundle_of("a")))
    assert (record["status"], record["error_class"], record["retryable"]) == ("failed", "out-of-memory", True)


@pytest.mark.parametrize("failures", [1, 2])
def test_pruning_that_does_not_fit_the_memory_is_tried_once_more(encoder, failures, monkeypatch):
    freed, errors, prune_or_fault = [], [NO_MEMORY] * failures, encode_stage.prune_or_raise_fault

    def prune_when_free(*arguments):
        if errors:
            raise errors.pop()
        return prune_or_fault(*arguments)

    monkeypatch.setattr(encode_stage, "prune_or_raise_fault", prune_when_free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(errors)))
    record, _ = only(encoder(bundle_of("a")))
    assert (record["status"], record.get("error_class")) == [("ok", None), ("failed", "out-of-memory")][failures - 1]
    assert freed[0] == failures - 1


def test_a_pass_that_does_not_fit_the_memory_goes_one_by_one_and_later_ones_have_half_the_frames():
    def together(visuals):
        if len(visuals) > 2:
            raise NO_MEMORY
        return visuals

    process, sizes = as_on_a_gpu(together)
    records = [record for record, _ in in_order(process(bundle_of(*"abcdefgh")))]
    assert [(record["video_id"], record["status"]) for record in records] == [(name, "ok") for name in "abcdefgh"]
    assert sizes == [4, 2, 2]
    assert shared_passes(records) == [None] * 4 + ["2 videos"] * 4


def shared_passes(records):
    return [json.loads(record["runtime"]).get("shared_pass") for record in records]


def test_one_video_with_bad_tokens_costs_no_other_one_of_its_pass():
    """It is encoded alone, where its tokens are good, or where the fault is its own."""

    def together(visuals):
        visuals[1].tokens[0, 0, 0] = math.nan
        return visuals

    process, sizes = as_on_a_gpu(together)
    records = [record for record, _ in in_order(process(bundle_of(*"abc")))]
    assert [record["status"] for record in records] == ["ok"] * 3 and sizes == [3]
    assert shared_passes(records) == ["3 videos", None, "3 videos"]


def test_a_bug_in_a_pass_is_an_error_row_of_those_alone_that_have_it_alone():
    def broken(tower):
        def encode(frames, *_):
            return 1 / 0 if frames[0, 0, 0, 0] == 77 else tower.encode(frames)

        return {"encode": encode, "encode_together": lambda videos, *_: [*map(encode, videos)]}

    marked = FRAMES.copy()
    marked[0, 0, 0, 0] = 77
    bundle = [*unpack_batch(bundle_of("a", "b")), *unpack_batch(decoded("bad", marked))]
    records = [record for record, _ in in_order(changed(broken, batch_frames=8)(pack(bundle)))]
    assert [record.get("error_class") for record in records] == [None, None, "internal"]
    assert "ZeroDivisionError" in records[2]["error_message"]


def test_videos_that_a_dead_process_had_in_hand_go_one_by_one_and_the_one_that_kills_again_is_refused(monkeypatch):
    """In a shared pass all of its videos are in hand; the processes after a crash share none."""
    me, held = Worker("w", "h", "n"), []
    actor, handle = heartbeats_here(monkeypatch, ("decode", "encode"), me)

    def die(*given) -> None:
        held.append(actor.read().inside["encode"])
        raise SystemExit

    def start(at: str) -> Encoder:
        """A process that dies in a shared pass, and at this video."""
        process = changed(lambda tower: {"encode_together": die}, handle=handle, batch_frames=8)
        alone = process.encoder.encode_video_alone
        one_by_one = lambda record, frames: die() if record["video_id"] == at else alone(record, frames)  # noqa: E731
        monkeypatch.setattr(process.encoder, "encode_video_alone", one_by_one)
        return process

    for _ in range(2):
        with pytest.raises(SystemExit):
            list(start("b")(bundle_of(*"abc")))
        actor.state("encode", me, [item.split()[0] for item in held[-1]], ProgressDelta())  # its last words
    assert held == [["a on h", "b on h", "c on h"], ["b on h"]]
    records = [record for record, _ in in_order(start("b")(bundle_of(*"abc")))]
    assert [record.get("error_class") for record in records] == [None, "crash", None]


pruned: list[tuple[str, list[int], int]] = []


@dataclass(frozen=True, kw_only=True)
class Recorder(Pruner):
    """Keeps the first tokens, and notes in which thread, of what shape and how many."""

    name: ClassVar[str] = "recorder"
    nested: ClassVar[bool] = False

    breaks: bool = False

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        pruned.append((threading.current_thread().name, list(visual.tokens.shape), budget))
        if self.breaks:
            raise RuntimeError("no compiler")
        return Selection(index=torch.arange(budget))


@pytest.fixture(autouse=True)
def _nothing_pruned():
    pruned.clear()


def test_a_method_compiles_in_a_thread_while_the_context_works():
    """The method waits for the context's body here, so that this ends only where both run at once."""
    begun = threading.Event()

    @dataclass(frozen=True, kw_only=True)
    class Waiting(Recorder):
        def select(self, *given) -> Selection:
            assert begun.wait(60)
            return super().select(*given)

    with compile_meanwhile(Waiting(), 0.25, (4, 9, 16), "cpu"):
        assert pruned == []
        begun.set()
    assert pruned == [("compile", [4, 9, 16], 9)]


def test_a_failure_is_warned_of_and_raises_nothing():
    warned = pytest.warns(RuntimeWarning, match="recorder could not be tried .*no compiler")
    with warned, compile_meanwhile(Recorder(breaks=True), 0.25, (2, 3, 4), "cpu"):
        pass
    assert len(pruned) == 1


def test_only_a_gpu_that_knows_its_videos_compiles_ahead(monkeypatch):
    """The shape is that of the kept tokens' source, by the model's config; a user's own method may do anything."""
    taken = []
    monkeypatch.setattr(encode_stage, "compile_meanwhile", lambda *given: taken.append(given))
    setup = EncodeSetup(ModelSource.resolve("tiny"), "gstep", 0.25, device="cpu", shape=(2, 384, 384))
    encoder = VideoEncoder(setup)
    assert taken == []
    encoder._runtime = replace(encoder._runtime, device="cuda")
    encoder._compile_kernels_meanwhile()
    tokens = encoder.backbone.encode(torch.zeros((2, 384, 384, 3), dtype=torch.uint8)).tokens
    assert [(given[1], given[2], given[3]) for given in taken] == [(0.25, tuple(tokens.shape), "cuda")]
    for other in (replace(setup, shape=None), replace(setup, pruner=f"{__name__}:Recorder")):
        encoder._setup = other
        encoder._compile_kernels_meanwhile()
    assert len(taken) == 1


@needs_cuda
def test_the_kernels_are_checked_before_the_first_video():
    from gstep.selection.gpu.check import check_kernels  # noqa: PLC0415 - Triton may be missing

    check_kernels.cache_clear()
    VideoEncoder(EncodeSetup(ModelSource.resolve("tiny"), "gstep", 0.25, shape=(32, 384, 384)))
    assert check_kernels.cache_info().currsize == 1
