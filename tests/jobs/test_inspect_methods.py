"""jobs.inspect --method: several methods on a video file, and on a video of caches that real runs have made."""

import shutil
from pathlib import Path

import pytest
import torch

import pipeline
from gstep.backbones import Backbone
from jobs import inspect, prune, recode
from pipeline import TokenCache
from pipeline.errors import RatioNotCached, UnknownVideo, UsageError
from tests.builders.clips import sample
from tests.builders.runs import document_of, forbid_models, said_by
from tests.pipeline.pages import pictures_of

CLIP = str(sample("bikes.mp4"))
METHODS = ["gstep", "vidcom2", "random,seed=1"]
LABELS = {"gstep": "gstep", "visionzip": "visionzip", "random": "random,seed=3"}


def test_a_file_is_shown_and_written(tmp_path):
    page = tmp_path / "page.html"
    argv = [CLIP, "--method", *METHODS, "--num-frames", "3", "--html", str(page), "--retention-ratio", "25%", ".10"]
    text = said_by(inspect, *argv)
    assert "in common at 25 %" in text and f"{page}: " in text and "bikes.mp4 with pictures of its frames" in text
    html = page.read_text()
    assert len(pictures_of(html)) == 3 and html.count("data-method=") == 6
    code, document, _ = document_of(inspect, [*argv, "a name"])
    assert (code, document["video_id"], document["page"]) == (0, "a name", str(page))
    assert [(row["method"], row["retention_ratio"]) for row in document["selections"]] == [
        (method, ratio) for ratio in (0.25, 0.1) for method in METHODS
    ]
    found = pipeline.compare(CLIP, methods=METHODS, retention_ratios=[0.25, 0.1], num_frames=3)
    assert [row["kept_per_frame"] for row in document["selections"]] == [row.kept_per_frame for row in found.rows]


@pytest.fixture(scope="module")
def caches(one_ray, tmp_path_factory) -> Path:
    """A folder with the videos ``v`` and caches of them: of gstep, of a merging method, and of all tokens."""
    folder = tmp_path_factory.mktemp("caches")
    (folder / "v").mkdir()
    shutil.copy(CLIP, folder / "v")
    (folder / "v" / "text.mp4").write_text("this is no video\n" * 50)
    ways = {"gstep": "", "visionzip": "--pruner visionzip", "whole": "--pruner none --evidence visionzip"}
    ways |= {"random": "--pruner random --seed 3", "fastvid": "--pruner fastvid --siglip tiny"}
    for name, flags in ways.items():
        said_by(prune, folder / "v", *f"--num-frames 4 --dtype float32 {flags}".split(), "--out", folder / name)
    said_by(recode, folder / "whole", "--token-codec", "int8", "--out", folder / "coded")
    return folder


@pytest.fixture
def no_models(monkeypatch):
    """Fails where a model is resolved or loaded: what is stored serves."""
    forbid_models(monkeypatch)


def compared(caches: Path, name: str, methods: list[str] | None = None, **options) -> pipeline.Comparison:
    return pipeline.compare(caches / name, "bikes.mp4", methods=methods, **options)


@pytest.mark.slow
def test_what_a_cache_stores_is_shown_as_it_is_stored(caches, no_models):
    for name, label in LABELS.items():
        video = TokenCache(caches / name).get("bikes.mp4")
        for methods in (None, [], [label]):
            (row,) = compared(caches, name, methods, video_roots=[str(caches / "v")]).rows
            assert torch.equal(row.index, video.index) and row.retention_ratio == 0.25
            assert (row.merged is None) == (name != "visionzip")
            assert row.merged is None or torch.equal(row.merged, video.merged)
    found = compared(caches, "gstep", ["gstep"], retention_ratios=[0.10, 0.25])
    assert "are those that" in found.origin and "--video-root" in found.pictures.missing
    smaller = TokenCache(caches / "gstep").get("bikes.mp4", 0.10)
    assert torch.equal(found.selections["gstep", 0.10].index, smaller.index)
    assert found.to_html().count('class="blank"') == 8
    with pytest.raises(RatioNotCached):
        compared(caches, "visionzip", retention_ratios=[0.10])


@pytest.mark.slow
def test_methods_select_from_the_tokens_of_a_whole_cache_as_runs_do(caches, no_models):
    methods = ["gstep", "visionzip", "random,seed=3", "vidcom2"]
    found = compared(caches, "whole", methods, video_roots=[str(caches / "v")])
    for name, label in LABELS.items():
        video, row = TokenCache(caches / name).get("bikes.mp4"), found.selections[label, 0.25]
        assert torch.equal(row.index, video.index)
        assert row.merged is None or torch.equal(row.merged, video.merged)
    assert "which are all tokens" in found.origin and len(found.pictures.jpegs) == 4
    assert list(compared(caches, "whole", ["none", "gstep"]).selections) == [("none", 1.0), ("gstep", 0.25)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["visionzip", "coded"])
def test_where_tokens_are_missing_the_source_is_encoded_again_once_by_the_cache_s_settings(caches, name, monkeypatch):
    calls, encode = [], Backbone.encode
    monkeypatch.setattr(Backbone, "encode", lambda self, *rest: calls.append(self.dtype) or encode(self, *rest))
    roots = {"video_roots": [str(caches / "v")], "retention_ratios": [0.25, 0.10]}
    found, whole = (compared(caches, cache, ["gstep", "visionzip", "vidcom2"], **roots) for cache in (name, "whole"))
    assert calls == [torch.float32]
    for key, row in found.selections.items():
        assert torch.equal(row.index, whole.selections[key].index)
    assert found.origin == "The source was encoded again, by the model and with the frames of the cache."
    assert found.metadata["frame_indices"] == whole.metadata["frame_indices"] and len(found.pictures.jpegs) == 4


@pytest.mark.slow
def test_the_checkpoint_of_evidence_is_the_one_of_the_cache_s_run(caches):
    found = compared(caches, "fastvid", ["fastvid", "gstep"], video_roots=[str(caches / "v")])
    stored = TokenCache(caches / "fastvid").get("bikes.mp4")
    assert torch.equal(found.selections["fastvid", 0.25].index, stored.index) and found.origin.endswith("of the cache.")
    assert len(compared(caches, "fastvid", ["gstep"], video_roots=[str(caches / "v")]).rows) == 1


@pytest.mark.slow
def test_a_selection_of_the_cache_that_the_source_does_not_give_again_is_noted(caches, monkeypatch):
    encode = Backbone.encode

    def scaled(self, *rest):
        visual = encode(self, *rest)
        visual.tokens[:2].mul_(-1)
        return visual

    monkeypatch.setattr(Backbone, "encode", scaled)
    found = compared(caches, "gstep", ["gstep", "vidcom2"], video_roots=[str(caches / "v")])
    stored = TokenCache(caches / "gstep").get("bikes.mp4").index
    share = torch.isin(found.selections["gstep", 0.25].index, stored).double().mean().item()
    assert share < 1 and f"; of gstep at 0.25 the cache holds {share:.1%} of what is shown." in found.origin


@pytest.mark.slow
def test_nothing_is_ever_compared_on_a_part_of_the_tokens(caches, tmp_path):
    def shown(cache: str, *options: str, code: int = 2) -> str:
        return said_by(inspect, caches / cache, "bikes.mp4", "--method", *options, code=code)

    text = shown("gstep", "gstep", "vidcom2")
    assert "holds only the tokens of gstep at 0.25, and vidcom2 would select from all tokens" in text
    assert f"--video-root {caches / 'v'}" in text and "python -m jobs.prune --pruner none" in text
    assert "encoded again" in shown("gstep", "gstep", "vidcom2", "--video-root", str(caches / "v"), code=0)
    text = shown("coded", "visionzip")
    assert "holds its tokens as int8, not as the encoder gave them" in text and "--evidence visionzip" in text
    assert "unknown parameter K of method 'ottvid'" in shown("whole", "ottvid,K=3")
    fastvid = ("fastvid", "--video-root", "/")
    text = shown("whole", *fastvid)
    assert "--method fastvid: " in text and "name it with --siglip" in text
    assert "fastvid" in shown("whole", *fastvid, "--siglip", "tiny", code=0)
    moved = shutil.copytree(caches / "gstep", tmp_path / "moved")
    shutil.rmtree(moved / "runs")
    text = shown(str(moved), "vidcom2", "--video-root", "/")
    assert "says how its videos were encoded: compare on the video file" in text


@pytest.mark.slow
def test_another_model_other_frames_and_other_videos_are_refused(caches):
    roots = {"video_roots": [str(caches / "v")]}
    with pytest.raises(UsageError, match=r"was made with other settings than the model has now: model\.weights"):
        compared(caches, "gstep", ["vidcom2"], model="shapes", **roots)
    with pytest.raises(UsageError, match="num_frames: a video of a cache has the frames and the precision"):
        compared(caches, "gstep", ["vidcom2"], num_frames=3, **roots)
    with pytest.raises(UsageError, match="is a cache: name one of its videos"):
        pipeline.compare(TokenCache(caches / "gstep"))
    with pytest.raises(UnknownVideo, match=r"did you mean bikes\.mp4"):
        pipeline.compare(TokenCache(caches / "gstep"), "bike.mp4")
    for methods in (None, ["vidcom2"]):
        with pytest.raises(UnknownVideo, match=r"'text\.mp4' failed: unsupported"):
            pipeline.compare(caches / "gstep", "text.mp4", methods=methods, **roots)


@pytest.mark.slow
def test_a_source_that_has_changed_since_is_not_encoded(caches):
    clip = caches / "v" / "bikes.mp4"
    content = clip.read_bytes()
    try:
        clip.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UsageError, match=r"its source cannot be encoded again: .*has changed since"):
            compared(caches, "gstep", ["vidcom2"], video_roots=[str(caches / "v")])
    finally:
        clip.write_bytes(content)
