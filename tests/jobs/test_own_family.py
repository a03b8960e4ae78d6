"""A family of one's own, named by ``--family module:Class``, from a video to answers."""

import json
import sys
from pathlib import Path

import pytest
import torch

import pipeline
from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.language import prompt_builder
from jobs import generate, prune, reprune
from pipeline.errors import UsageError, VideoFault
from tests.builders.clips import sample
from tests.builders.runs import document_of, environment, said_by
from tests.interpreter import run_python
from tests.paths import ROOT, python_path

CODE = '''
from dataclasses import replace

from gstep.backbones.llava_onevision import LlavaOnevision, LlavaOnevisionBackbone
from gstep.errors import TooFewFrames, UnsupportedVideo


class Silent(LlavaOnevision):
    """The family of the table, which does not answer and does not know its work."""

    def flops(self, n_frames, height, width):
        return None

    def load(self, runtime, *, frame_batch=32):
        backbone = super().load(runtime, frame_batch=frame_batch)
        backbone.__class__ = Backbone
        return backbone


class Mine(Silent):
    prompts = "gstep.language.llava_onevision:LlavaOnevisionPrompts"


class Backbone(LlavaOnevisionBackbone):
    def encode(self, frames, evidence=(), video=None):
        if video.clip_frames == 132:
            raise UnsupportedVideo("this model takes no rabbits")
        if video.n_frames < 2:
            raise TooFewFrames(f"{video.n_frames} frame is too few")
        return replace(super().encode(frames, dict(evidence)), extra={"seconds": video.times_in_clip})
'''
MINE = ["--family", "own_family:Mine"]
FRAMES = ["--num-frames", "4"]


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder with the module of the family, in which this process finds it."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_family.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("own_family", None)


def test_a_video_goes_through_a_users_own_family(own):
    options = {"model": "tiny", "num_frames": 4, "device": "cpu"}
    mine = pipeline.LocalEncoder(family="own_family:Mine", **options)
    bikes, rabbit = sample("bikes.mp4"), sample("bigbuckbunny.mp4")
    stock = pipeline.encode_video(bikes, **options)
    assert torch.equal(mine(bikes).pruned.tokens, stock.pruned.tokens)
    with pytest.raises(VideoFault, match="takes no rabbits") as error:
        mine(rabbit)
    assert error.value.fault_class == "unsupported"
    with pytest.raises(VideoFault, match="1 frame is too few") as error:
        pipeline.encode_video(bikes, family="own_family:Mine", **{**options, "num_frames": 1})
    assert error.value.fault_class == "too-short"
    with pytest.raises(UsageError, match="does not define load"):
        (own / "own_family.py").write_text("from gstep.backbones import ModelFamily\nclass Mine(ModelFamily): pass\n")
        sys.modules.pop("own_family")
        pipeline.LocalEncoder(family="own_family:Mine", **options)


def test_a_plan_of_a_family_that_does_not_know_its_work(own):
    plan = ["--model", "tiny", "--plan", "--videos", "1000", "--seconds", "60"]
    gpus = ["--gpus", "2", "--gpu-type", "A100", "--price", "gpu-hour=2"]
    record, known = (document_of(prune, [*plan, *gpus, *family])[1] for family in (MINE, []))
    assert record.keys() == known.keys()
    assert record["gpu_s"] is None and record["stage_s"]["encode"] is None and record["encode_core_s"]["high"] == 0
    assert record["bottleneck"] in ("decode", "driver") and record["cost"]["total"]["expected"] > 0
    assert any("is not known, so time and cost are without encoding" in note for note in record["notes"])
    _, record, _ = document_of(prune, [*plan, *MINE, "--decode-cores", "8"])  # without GPUs
    assert record["encode_core_s"] is None and record["gpu_s"]["high"] == 0
    assert record["bottleneck"] == "decode" and "nvdec" not in record["remedy"]


@pytest.mark.slow
def test_a_cache_of_a_users_own_family_and_who_may_read_it(own, tmp_path):
    """Ray's workers find the module on PYTHONPATH; a reader imports it where the user names it alone."""
    videos = [str(sample(name)) for name in ("bigbuckbunny.mp4", "bikes.mp4")]
    cache, answers = tmp_path / "mine", tmp_path / "answers"
    argv = [*videos, "--model", "tiny", *FRAMES, "--pruner", "none", "--out", str(cache)]
    there = environment(PYTHONPATH=python_path(ROOT, own))
    done = run_python("-m", "jobs.prune", *argv, *MINE, env=there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((cache / "cache.json").read_text())["identity"]["model"]["family"] == "own_family:Mine"
    tokens = pipeline.TokenCache(cache)
    assert list(tokens.video_ids) == ["bikes.mp4"]
    assert len(tokens.metadata("bikes.mp4")["model_extra"]["seconds"]) == 4
    with pytest.raises(pipeline.FailedVideo, match="unsupported: this model takes no rabbits"):
        tokens.get("bigbuckbunny.mp4")
    (record,) = (cache / "runs").glob("*.json")
    assert json.loads(record.read_text())["config"]["family"] == "own_family:Mine"

    asking = [str(cache), "--ask", "What moves?", "--max-new-tokens", "4", "--out", str(answers)]
    refusals = [
        (prune, argv, "model.family"),
        (generate, asking, "what a cache says chooses no code: give --family own_family:Mine"),
        (reprune, [str(cache), "--out", str(tmp_path / "new")], "what a cache says chooses no code"),
    ]
    for command, words, why in refusals:
        assert why in said_by(command, *words, code=2)
    assert not answers.exists()

    done = run_python("-m", "jobs.generate", *asking, *MINE, env=there)
    assert done.returncode == 0, done.stdout + done.stderr
    stock = tmp_path / "stock"
    pipeline.prune_videos(videos[1:], out=stock, model="tiny", num_frames=4, pruner="none", progress=False)
    asked = pipeline.answer_questions(stock, ask=["What moves?"], out=tmp_path / "stock-answers", max_new_tokens=4)
    expected = pipeline.read_answers(asked.out)["answer"].to_pylist()
    assert [text for text in pipeline.read_answers(answers)["answer"].to_pylist() if text is not None] == expected


def test_a_family_without_prompts_is_asked_nothing(own):
    with pytest.raises(ModelError, match=r"Silent cannot answer questions.* the attribute prompts = 'module:Class'"):
        prompt_builder(ModelSource.resolve("tiny", family="own_family:Silent"))
