"""Several methods on one video: each selection is the one that a run would cache, and all are of one encoding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gstep
import pipeline
from gstep.backbones import Backbone, ModelSource, family_of
from gstep.methods import VIDEO_METHODS
from gstep.pruners.random import Random
from pipeline.errors import UsageError, VideoFault
from pipeline.inspect.selecting import list_requested_selections
from tests.builders.caches import encode_clip
from tests.builders.clips import sample
from tests.builders.runs import forbid_ray

CLIP = sample("bikes.mp4")
FRAMES = {"num_frames": 3, "device": "cpu", "dtype": "float32"}
RATIOS = (0.25, 0.10)
FAMILIES = ("tiny", "tiny-internvl", "tiny-qwen3-vl")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    forbid_ray(monkeypatch)


@pytest.fixture
def encodings(monkeypatch) -> list[int]:
    """The number of frames of each video that is encoded."""
    calls, encode = [], Backbone.encode

    def counted(self, frames, *arguments):
        calls.append(len(frames))
        return encode(self, frames, *arguments)

    monkeypatch.setattr(Backbone, "encode", counted)
    return calls


def resolved(model: str) -> ModelSource:
    source = ModelSource.resolve(model)
    return family_of(source).with_pooling_head("tiny") if model == "tiny" else source


def methods_of(model: str) -> list[str]:
    """The methods whose evidence a model's encoder gives."""
    family = family_of(resolved(model))
    variants = {name: list_requested_selections([name], [0.25], 0, family.variant)[0].pruner for name in VIDEO_METHODS}
    return [name for name, pruner in variants.items() if set(pruner.sources.items()) <= family.gives]


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
def test_each_selection_is_the_one_that_a_run_caches_and_the_video_is_encoded_once(model, encodings):
    methods = methods_of(model)
    siglip = {"siglip": "tiny"} if model == "tiny" else {}
    found = pipeline.compare(CLIP, methods=methods, retention_ratios=RATIOS, model=model, **FRAMES, **siglip)
    assert encodings == [3]
    assert len(methods) == {"tiny": 17, "tiny-internvl": 11}.get(model, 14)
    assert [method for method, ratio in found.selections if ratio == 0.10] == [m for m in methods if m != "none"]
    for (method, ratio), selection in found.selections.items():
        if method in ("random", "gstep") or (len(method) % 2) == (ratio == 0.10):  # half of them: each is encoded here
            params = {name: value for name, value in selection.settings.items() if name != "seed"}  # it is 0 in both
            kept = encode_clip(resolved(model), CLIP, 3, method, ratio, **params)[1].kept
            order = np.argsort(kept.index)
            assert selection.index.tolist() == kept.index[order].tolist(), (method, ratio)
            assert (selection.merged is None) == (kept.merged is None)
            assert selection.merged is None or selection.merged.tolist() == kept.merged[order].tolist()


def test_methods_come_by_ratio_with_their_parameters_and_seeds_and_equal_ones_once():
    methods = ["gstep", "gstep,alpha=0.9", "random,seed=0..1", Random(), "none", "gstep"]
    found = pipeline.compare(CLIP, methods=methods, retention_ratios=[0.10, 0.25], seed=4, **FRAMES)
    names = ["gstep", "gstep,alpha=0.9", "random,seed=0", "random,seed=1", "random"]
    assert list(found.selections) == [("none", 1.0), *((name, ratio) for ratio in RATIOS for name in names)]
    assert found.retention_ratios == [1.0, *RATIOS]
    at = {name: found.selections[name, 0.25] for name in names}
    assert at["gstep,alpha=0.9"].settings["alpha"] == 0.9 and at["gstep"].settings["alpha"] == 0.5
    assert [at[name].settings["seed"] for name in names[2:]] == [0, 1, 4]
    assert len({tuple(selection.index.tolist()) for selection in at.values()}) == 5
    assert pipeline.compare(CLIP, methods="random", seed=1, **FRAMES).rows[0].method == "random,seed=1"
    own = list_requested_selections([gstep.make_pruner("gstep", alpha=0.9)], RATIOS, 0, "llava")
    assert [row.label for row in own] == ["gstep,alpha=0.9"] * 2
    assert repr(found).startswith("Comparison('bikes.mp4': none at 100 %, gstep at 25 %, ")


def test_shares_in_common_are_those_of_the_sets_of_tokens():
    found = pipeline.compare(CLIP, methods=["gstep", "vidcom2", "evs"], retention_ratios=RATIOS, **FRAMES)
    for ratio in RATIOS:
        rows = found.at(ratio)
        sets = [set(row.index.tolist()) for row in rows]
        expected = [[len(a & b) / len(a) for b in sets] for a in sets]
        assert found.overlap(ratio).tolist() == pytest.approx(np.array(expected))
        for row in rows:
            counts = torch.bincount(row.index // 196, minlength=3)
            assert row.kept_per_frame == counts.tolist() == row.mask().sum(axis=1).tolist()
            assert row.kept_ratio == len(row.index) / (3 * 196)
    record = found.as_record()
    assert record["n_total"] == 3 * 196 and record["grid"] == [14, 14]
    assert [entry["n_kept"] for entry in record["selections"]] == [len(row.index) for row in found.rows]
    assert record["in_common"][0]["shares"][0][0] == 1.0


def test_a_clip_has_its_own_frames_and_a_file_its_name():
    found = pipeline.compare(CLIP, "a name", start_s=1.0, end_s=2.0, **FRAMES)
    assert found.video_id == "a name" and list(found.selections) == [("gstep", 0.25)]
    assert found.metadata["timestamps"][0] == 1.0 and found.metadata["timestamps"][-1] < 2.0
    assert found.metadata["start_s"] == 1.0


def test_a_video_on_s3_is_one_get(server, monkeypatch):
    """Nothing looks for a cache below the name of a video: a bucket that lets nobody list it would refuse that."""
    server.reach(monkeypatch)
    found = pipeline.compare(server.upload("a/bikes.mp4", CLIP.read_bytes()), **FRAMES)
    assert server.counts() == {"GET": 1}
    assert torch.equal(found.rows[0].index, pipeline.compare(CLIP, **FRAMES).rows[0].index)
    assert found.video_id == "bikes.mp4" and len(found.pictures.jpegs) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": ["gstep", "fastv"]}, "anew for every question.*leave it out"),
        ({"methods": ["gstp"]}, r"unknown method 'gstp' \(did you mean gstep\?\)"),
        ({"methods": ["gstep,positions=original"]}, "--method gstep,positions=original: positions are of prompts"),
        ({"methods": ["ottvid"], "model": "tiny-qwen3-vl"}, "--method ottvid: the encoder of qwen3_vl does not give"),
        ({"methods": ["vidcom2", "fastvid"]}, "--method fastvid: .*name it with --siglip"),
        ({"methods": ["visionzip"], "siglip": "tiny"}, "none of the methods takes anything from a SigLIP checkpoint"),
        ({"retention_ratios": [25.0]}, r"--retention-ratio must be in \(0, 1\], got 25.0; did you mean 25%\?"),
        ({"num_frame": 8}, r"did you mean num_frames\?"),
        ({"pruner": "gstep"}, r"compare\(\) takes no pruner"),
        ({"video_roots": ["/"]}, "is not a cache: --video-root applies only to"),
        ({"model": "/gone"}, "gone"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        pipeline.compare(CLIP, **options)


def test_a_video_that_cannot_be_read_and_a_method_that_cannot_prune_it_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.mp4").write_text("this is no video\n" * 50)
    for name, fault in (("gone.mp4", "io"), ("text.mp4", "unsupported")):
        with pytest.raises(VideoFault) as caught:
            pipeline.compare(name, **FRAMES)
        assert caught.value.fault_class == fault and name in str(caught.value)
    (tmp_path / "own_limit.py").write_text(
        "from dataclasses import dataclass\nfrom gstep.pruners.gstep import GSTEP\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(GSTEP):\n    limit: int = 2\n\n"
        "    def select(self, visual, *arguments):\n        if len(visual.tokens) > self.limit:\n"
        "            raise KeyError('too long')\n        return super().select(visual, *arguments)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = pipeline.compare(CLIP, methods=["gstep", "own_limit:Mine,limit=3"], **FRAMES)
    assert torch.equal(*(row.index for row in found.rows))
    with pytest.raises(VideoFault, match=r"own_limit:Mine: .*own_limit.py:11: KeyError: 'too long'") as caught:
        pipeline.compare(CLIP, methods=["gstep", "own_limit:Mine"], **FRAMES)
    assert caught.value.fault_class == "own-code"


def test_a_selection_of_no_tokens_in_a_frame_counts_as_zero():
    row = pipeline.MethodSelection("m", 0.1, torch.tensor([5, 7]), torch.tensor([False, True]), 12, 4)
    assert row.kept_per_frame == [0, 2, 0] and row.per_frame_label == "0 to 2" and row.n_merged == 1
    assert row.mask(merged=True).ravel().nonzero()[0].tolist() == [7]
    assert replace(row, index=torch.tensor([0, 4, 8])).per_frame_label == "1"
