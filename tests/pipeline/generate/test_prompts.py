"""Cached videos for prompts: pruned when asked they are what a cache pruned by the method would give; their times."""

import re
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata, load_video

import gstep
from gstep.backbones import Backbone, ModelSource, choose_runtime, family_of
from gstep.language import Decoding, prompt_builder
from gstep.methods import VIDEO_METHODS
from pipeline import TokenCache
from pipeline.cache.header import describe_method
from pipeline.errors import UsageError
from pipeline.generate.engines import load_engine
from pipeline.generate.late_pruning import LatePruning, PruningSpec, resolve_pruning
from pipeline.generate.prompts import LruCache, PreparedQuestion, PromptMaker, VideoMemory, count_bytes
from pipeline.generate.questions import AnswerMode
from pipeline.options import EngineOptions
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.prune.recipe import parse_evidence
from pipeline.runner.worker_heartbeat import Heartbeat
from pipeline.storage.stores import LocalStore
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.answers import lines_of, prepared, request_about, setup_of, thinking_model, tiny_cache
from tests.builders.caches import cache_of, encode_clip, make_identity, write_shard
from tests.builders.clips import sample, uneven_clip
from tests.gstep.language.prompts import builder, text_of
from tests.gstep.llms import DENSE, Encoded, llm, stock, stock_inputs
from tests.gstep.stock import stock_video_text

RATIOS = (0.25, 0.02)
LLAVA_ALONE = {"holitom", "flashvid", "ottvid"}
CASES = [
    *(("tiny", method) for method in sorted(VIDEO_METHODS.keys() - {"none"})),
    *(("tiny-qwen2-5-vl", method) for method in ("fastvid", "gstep", "holitom", "tango", "visionzip")),
    *(("tiny-qwen3-vl", method) for method in ("gstep", "ottvid", "vidcom2")),
]
in_tiny = pytest.mark.parametrize("made", ["tiny"], indirect=True)


class Made:
    """One clip, its frames, and caches that methods make of it."""

    def __init__(self, model: str, folder: Path) -> None:
        self.source, self.folder = ModelSource.resolve(model), folder
        if model == "tiny":
            self.source = family_of(self.source).with_pooling_head("tiny")
        decoded = decode_video(
            DecodeRequest(sample("carphone_pristine.mp4"), Sampling(4), family_of(self.source).preprocessor())
        )
        self.frames = decoded.frames
        self.methods = VIDEO_METHODS.keys() - (set() if model == "tiny" else LLAVA_ALONE)
        self.record = {"video_id": "v", "uri": "v.mp4", "status": "ok", **make_decoding_columns(decoded, 1)}
        self.backbone: Backbone | None = None
        static = family_of(self.source).static()
        self.header = {"deepstack_levels": static.deepstack_levels}
        if static.newline is None:
            self.header["newline"] = None

    def cache(self, name: str, method: str, ratio: float, seed: int = 0) -> TokenCache:
        pruner = gstep.make_pruner(method)
        if pruner.family_parameter is not None:
            pruner = gstep.make_pruner(method, **{pruner.family_parameter: family_of(self.source).variant})
        whole = method == "none"
        evidence = parse_evidence(sorted(self.methods), self.source.model_type, pruner) if whole else {}
        options = {"pruner_params": pruner.params(), "evidence": evidence, "device": "cpu", "dtype": "float32"}
        setup = EncodeSetup(self.source, method, ratio, seed, **options)
        identity = make_identity(ratio, source=self.source, pruner=describe_method(pruner), evidence=evidence)
        store = tiny_cache(self.folder / name, (), source=self.source, identity=identity, **self.header)
        encoder = VideoEncoder(setup, self.backbone)
        self.backbone = encoder.backbone
        write_shard(store, "run", encoder.encode_video_alone(self.record, self.frames))
        return TokenCache(self.folder / name)

    @cached_property
    def whole(self) -> TokenCache:
        return self.cache("whole", "none", 1.0)

    def late(self, cache: TokenCache, method: str, ratio: float, seed: int = 0) -> LatePruning:
        asked = PruningSpec(method, ratio, seed=seed)
        return resolve_pruning(asked, cache.identity, self.source, prompt_builder(self.source))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes those of each model once."""
    return lru_cache(lambda model: Made(model, tmp_path_factory.mktemp(model)))


@pytest.fixture
def made(request, make):
    return make(request.param)


@pytest.fixture
def whole(made):
    return made.whole


@pytest.mark.parametrize(("made", "method"), CASES, indirect=["made"])
def test_late_and_early_pruning_give_the_same_tokens_bit_for_bit(made, whole, method):
    if method not in made.methods:
        with pytest.raises(UsageError, match=rf"--pruner {method} needs token_attention .*: .* does not give it"):
            made.late(whole, method, 0.25)
        return
    nested = gstep.make_pruner(method).nested
    lates = {ratio: made.late(whole, method, ratio, seed=7) for ratio in (RATIOS if nested else RATIOS[:1])}
    videos, early = VideoMemory(whole, lates.values()), made.cache(method, method, RATIOS[0], seed=7)
    for ratio, late in lates.items():
        expected = early.get("v", ratio if nested else None, "selection" if late.pruner.reorders else "index").visual
        got = videos.prune(videos.read("v"), late)
        assert torch.equal(got.index, expected.index), ratio
        for ours, theirs in zip((got.tokens, *got.deepstack), (expected.tokens, *expected.deepstack), strict=True):
            assert torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16)), ratio
        assert (got.n_frames, got.extra) == (expected.n_frames, expected.extra) and not got.evidence


@in_tiny
def test_a_video_is_read_once_and_selected_from_once_a_method(made, whole):
    methods = ("gstep", "random", "uniform")
    lates = [made.late(whole, method, ratio) for method in methods for ratio in RATIOS]
    videos = VideoMemory(whole, lates)
    video = videos.read("v")
    with patch.object(LatePruning, "select", autospec=True, side_effect=LatePruning.select) as select:
        read_s, first = videos.read_s, [videos.prune(video, late) for late in lates]
        assert videos.read("v") is video and videos.read_s == read_s > 0  # it was read once
        assert all(videos.prune(video, late) is visual for late, visual in zip(lates, first, strict=True))
    selected = [call.args[0].pruner.name for call in select.call_args_list]
    assert selected == ["gstep", "random", *["uniform"] * len(RATIOS)]
    assert videos.prune(video).tokens.shape[0] == first[0].n_frames * first[0].tokens_per_frame


@in_tiny
def test_seeds_are_selections_of_their_own(made, whole):
    videos, lates = VideoMemory(whole), [made.late(whole, "random", 0.1, seed) for seed in (0, 1)]
    first, second = (videos.prune(videos.read("v"), late) for late in lates)
    assert not torch.equal(first.index, second.index)
    assert lates[1].describe()["seed"] == 1 and "seed" not in made.late(whole, "gstep", 0.1).describe()


def test_a_cache_of_version_1_whose_evidence_has_bare_names_serves_too():
    source, evidence = ModelSource.resolve("tiny"), {"token_attention": "last_layer", "token_key": "last_layer"}
    identity = make_identity(1.0, "none", source=source, evidence=evidence)
    late = resolve_pruning(PruningSpec("visionzip", 0.25), identity, source, prompt_builder(source))
    assert dict(late.evidence) == {"token_attention": "token_attention", "token_key": "token_key"}


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    memory: LruCache[str, int] = LruCache(10, lambda value: value)
    for name, size in (("a", 4), ("b", 4)):
        memory.put(name, size)
    assert memory.get("a") == 4
    memory.put("c", 4)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (4, None, 4)
    memory.put("large", 99)
    assert memory.get("large") == 99 and memory.get("a") is None  # the very last one stays whatever it takes
    cache = tiny_cache(tmp_path / "c", ("a", "b"))
    opened = TokenCache(str(cache), store=cache)
    videos = VideoMemory(opened, max_bytes=count_bytes(opened.get("a").visual))
    a = videos.read("a")
    assert videos.read("a") is a and videos.prune(a) is a.visual is a.visual
    videos.read("b")
    assert videos.read("a") is not a  # it had to go


def test_a_pruning_may_have_positions_of_its_own(tmp_path):
    """The same tokens: close ranks, or where they were before pruning, as its name and its description say."""
    tiny_cache(tmp_path / "c", ("v",), ratio=1.0, method="none")
    store = LocalStore(tmp_path / "c")
    held, source = TokenCache(tmp_path / "c").identity, ModelSource.resolve("tiny")
    asked = {one.label: one for p in (None, "original") for one in [PruningSpec("gstep", 0.1, positions=p)]}
    assert list(asked) == ["gstep@0.1", "gstep,positions=original@0.1"]
    lates = {label: resolve_pruning(one, held, source, prompt_builder(source)) for label, one in asked.items()}
    assert [late.describe().get("positions") for late in lates.values()] == [None, "original"]
    engine = load_engine(EngineOptions(), source, choose_runtime("cpu", "float32", "auto"))
    prompts = PromptMaker(setup_of(store, prunings=lates), engine, "cpu", Heartbeat("answer"))
    question = {"question_id": "q", "video_ids": ["v"], "prompt": "What?", "attempts": 1}
    how = AnswerMode(Decoding(), "generate")
    close, original = (prompts.make({**question, "pruning": label}, how).prompt for label in lates)
    assert torch.equal(close.input_ids, original.input_ids) and torch.equal(
        close.positions[0], torch.arange(len(close))
    )
    assert not torch.equal(original.positions, close.positions) and original.extent > close.extent


def test_a_thought_is_closed_in_the_prompt_and_in_the_identity_of_the_answers(tmp_path):
    folder = thinking_model(tmp_path / "thinking")
    tiny_cache(tmp_path / "c", ("a",), source=ModelSource.resolve(folder))

    def made(**options):
        rows = [{"question_id": 1, "video_id": "a", "prompt": "Why?"}]
        job = request_about(tmp_path / "c", rows, model=str(folder), **options)
        told = any("ends with <think>, so the model reasons first" in line for line in lines_of(job))
        return text_of("tiny", prepared(job).prompt), job.identity, told

    (plain, before, told), (closed, identity, told_too) = made(), made(close_thought=True)
    assert told and not told_too
    assert plain.endswith("<think>\n") and closed == f"{plain}\n</think>\n\n"
    assert identity == {**before, "prompt": {**before["prompt"], "thought": "closed"}} and "thought" not in before


def test_the_model_of_this_package_is_said_to_answer_by_letters_only(tmp_path):
    tiny_cache(tmp_path / "c", ("a",), source=ModelSource.resolve("shapes"), shape=(4, 36, 128))
    question = {"question_id": 1, "video_id": "a", "prompt": "What color is the circle?"}
    asked = [question, {**question, "question_id": 2, "choices": ["red", "blue"]}]

    def notes(rows):
        return [line for line in lines_of(request_about(tmp_path / "c", rows)) if "no choices" in line]

    assert notes(asked[1:]) == []
    (note,) = notes(asked)
    assert "1 of 2 questions have no choices. shapes was trained only on questions with choices" in note


SOURCE = ModelSource.resolve("tiny-qwen3-vl")
FRAMES = 5  # odd: the last one is repeated in a temporal patch
ROW = {"question_id": "1", "video_id": "v", "prompt": "Why?"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return uneven_clip(tmp_path_factory.mktemp("videos") / "uneven.mp4")


@pytest.fixture(scope="module")
def cache(clip, tmp_path_factory) -> Path:
    """Of the whole file, of it from 1.05 s on, and of it as a row that lacks its frame rate."""
    _, whole = encode_clip(SOURCE, clip, FRAMES, "none", 1.0)
    _, late = encode_clip(SOURCE, clip, FRAMES, "none", 1.0, "late", start_s=1.05)
    lacking = replace(whole, record={**whole.record, "video_id": "lacking", "fps": None})
    out = tmp_path_factory.mktemp("caches") / "c"
    cache_of(out, SOURCE, whole, late, lacking)
    return out


def asked(cache, video_id="v", **options):
    """What the actor makes of a question on a video."""
    return prepared(request_about(cache, [{**ROW, "video_id": video_id}], **options))


def text(prompt) -> str:
    return builder(SOURCE.name).tokenizer.decode(prompt.input_ids)


def times(prompt) -> list[float]:
    return [float(seconds) for seconds in re.findall(r"<([0-9.]+) seconds>", text(prompt))]


def stock_prompt(metadata, grid_thw) -> str:
    video = f"<|vision_start|>{stock_video_text(metadata, grid_thw)}<|vision_end|>"
    return f"<|im_start|>user\n{video}Why?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("reader", ["pyav", "decord"])
def test_stock_times_make_the_prompt_of_the_stock_processor_on_the_file_itself(cache, clip, reader):
    pytest.importorskip({"pyav": "av"}.get(reader, reader))
    evenly = partial(np.linspace, 0, 34, FRAMES, dtype=int)  # of the file's 35 frames
    _, metadata = load_video(str(clip), backend=reader, sample_indices_fn=lambda metadata, **_: evenly())
    prompt = asked(cache, frame_times="stock").prompt
    (visual,) = prompt.visuals
    assert list(visual.frame_indices) == list(metadata.frames_indices)
    # Its header states 16.5 frames a second, and readers believe it.
    assert visual.fps == pytest.approx(34 / 2.2) and metadata.fps == pytest.approx(16.5, abs=0.1)
    metadata.fps = visual.fps
    assert text(prompt) == stock_prompt(metadata, visual.extra["video_grid_thw"])


def test_the_times_differ_and_the_true_ones_are_the_default(cache):
    assert text(asked(cache).prompt) == text(asked(cache, frame_times="true").prompt)
    assert times(asked(cache).prompt) == [0.2, 1.0, 2.2]
    assert times(asked(cache, frame_times="stock").prompt) == [0.3, 1.4, 2.2]
    assert isinstance(asked(cache, "lacking"), PreparedQuestion)
    row = asked(cache, "lacking", frame_times="stock")
    assert row["error_class"] == "bad-prompt"
    assert "prune the video again, or use --frame-times true" in row["error_message"]


def test_a_clip_has_stock_times_from_the_start_of_its_file(cache):
    """As qwen-vl-utils hands video_start on: by the places of frames in the file, of which it subtracts nothing."""
    row = TokenCache(cache).metadata("late")
    assert (row["start_s"], row["frame_indices"][0], row["timestamps"][0]) == (1.05, 23, pytest.approx(1.1))
    metadata = VideoMetadata(total_num_frames=12, fps=row["fps"], frames_indices=list(row["frame_indices"]))
    prompt = asked(cache, "late", frame_times="stock").prompt
    assert text(prompt) == stock_prompt(metadata, row["model_extra"]["video_grid_thw"])
    assert times(prompt)[0] == 1.6 and times(asked(cache, "late").prompt)[0] == 0.2


def test_answers_are_of_their_times_where_the_model_reads_any(cache, tmp_path):
    tiny_cache(tmp_path / "c", ("v",))
    for place, stored in ((cache, {"frame_times": "stock"}), (tmp_path / "c", {})):
        plain, stock = (request_about(place, [ROW], frame_times=times).identity for times in ("true", "stock"))
        assert plain == request_about(place, [ROW]).identity and "frame_times" not in plain["prompt"]
        assert stock == {**plain, "prompt": {**plain["prompt"], **stored}}


def cached(source, name, tmp_path, method, ratio, **params):
    """One real clip through decoder, encoder, pruner, writer and reader: (frames, Visual)."""
    frames, row = encode_clip(source, sample("bikes.mp4"), FRAMES, method, ratio, **params)
    cache_of(tmp_path / method, source, row, method=method, ratio=ratio)
    cache = TokenCache(tmp_path / method)
    newline = stock(name).model.image_newline.bfloat16() if name == "tiny" else None
    return frames, replace(cache.get("v").visual, newline=newline)


def pixels_of(source, name, frames, visual):
    """What the stock model takes instead of the tokens."""
    preprocessor, given = family_of(source).preprocessor(), (frames, "cpu", torch.float32)
    if name == "tiny":
        return {"pixel_values_videos": preprocessor.normalise(*given)[None]}
    if name == "tiny-internvl":
        return {"pixel_values": preprocessor.normalise(*given)}
    grid = torch.tensor([visual.extra["video_grid_thw"]])
    inputs = {"pixel_values_videos": preprocessor.patches(*given), "video_grid_thw": grid}
    if name == "tiny-qwen2-5-vl":
        inputs["second_per_grid_ts"] = torch.tensor([visual.extra["second_per_grid_ts"]])
    return inputs


@pytest.mark.parametrize("name", DENSE)
def test_all_tokens_are_within_what_bfloat16_does_and_pruned_ones_are_rows_of_them(name, tmp_path):
    source = ModelSource.resolve(name)
    frames, whole = cached(source, name, tmp_path, "none", 1.0)
    prompt = prompt_builder(source).build("What is happening in this video?", [whole])
    inputs = stock_inputs(name, prompt, Encoded(whole, pixels_of(source, name, frames, whole)))
    with torch.no_grad():
        expected = stock(name)(**inputs).logits[0]
    (logits,) = llm(name).logits([prompt])
    # Measured: 0.03 to 0.08, of logits whose deviation is 2.
    assert (logits - expected).abs().quantile(0.95) < 0.15
    assert expected.std() > 1
    _, pruned = cached(source, name, tmp_path, "gstep", 0.25)
    assert len(pruned.index) == len(whole.index) // 4
    for ours, level in zip((pruned.tokens, *pruned.deepstack), (whole.tokens, *whole.deepstack), strict=True):
        assert torch.equal(ours, level[pruned.index])
