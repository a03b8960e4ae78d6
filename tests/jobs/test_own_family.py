"""A family of one's own by ``--family module:Class``, and the family generic, from a video to answers."""

import json
import sys
from pathlib import Path

import pytest
import torch

import pipeline
from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.language import prompt_builder
from jobs import generate, merge, prune, reprune, verify
from pipeline.errors import IdentityMismatch, UsageError, VideoFault
from pipeline.generate.model import find_model
from pipeline.serve.config import ServeConfig
from pipeline.serve.server import make_served_cache
from tests.builders.clips import sample
from tests.builders.runs import ALONE, document_of, environment, said_by
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
def test_a_cache_of_a_users_own_family_and_who_may_read_it(own, one_ray, tmp_path):
    """Ray's workers find the module on PYTHONPATH; a reader imports it where the user names it alone.

    A process that has the variable starts a Ray of its own, for both commands.
    """
    videos = [str(sample(name)) for name in ("bigbuckbunny.mp4", "bikes.mp4")]
    cache, answers = tmp_path / "mine", tmp_path / "answers"
    argv = [*videos, "--model", "tiny", *FRAMES, "--pruner", "none", "--out", str(cache)]
    asking = ["--ask", "What moves?", "--max-new-tokens", "4", "--out"]
    commands = (
        "from jobs import generate, prune\n"
        f"raise SystemExit(prune.main({[*argv, *MINE]}) or generate.main({[str(cache), *asking, str(answers), *MINE]}))"
    )
    done = run_python("-c", commands, env=environment(PYTHONPATH=python_path(ROOT, own), **ALONE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((cache / "cache.json").read_text())["identity"]["model"]["family"] == "own_family:Mine"
    tokens = pipeline.TokenCache(cache)
    assert list(tokens.video_ids) == ["bikes.mp4"]
    assert len(tokens.metadata("bikes.mp4")["model_extra"]["seconds"]) == 4
    with pytest.raises(pipeline.FailedVideo, match="unsupported: this model takes no rabbits"):
        tokens.get("bigbuckbunny.mp4")
    (record,) = (cache / "runs").glob("*.json")
    assert json.loads(record.read_text())["config"]["family"] == "own_family:Mine"

    unread = str(tmp_path / "unread")
    refusals = [
        (prune, argv, "model.family"),
        (generate, [str(cache), *asking, unread], "what a cache says chooses no code: give --family own_family:Mine"),
        (reprune, [str(cache), "--out", str(tmp_path / "new")], "what a cache says chooses no code"),
    ]
    for command, words, why in refusals:
        assert why in said_by(command, *words, code=2)
    assert not Path(unread).exists()

    stock = tmp_path / "stock"
    pipeline.prune_videos(videos[1:], out=stock, model="tiny", num_frames=4, pruner="none", progress=False)
    asked = pipeline.answer_questions(stock, ask=["What moves?"], out=tmp_path / "stock-answers", max_new_tokens=4)
    expected = pipeline.read_answers(asked.out)["answer"].to_pylist()
    assert [text for text in pipeline.read_answers(answers)["answer"].to_pylist() if text is not None] == expected


def test_a_family_without_prompts_is_asked_nothing(own):
    with pytest.raises(ModelError, match=r"Silent cannot answer questions.* the attribute prompts = 'module:Class'"):
        prompt_builder(ModelSource.resolve("tiny", family="own_family:Silent"))


CLIP = sample("bikes.mp4")
MODEL = ["--model", "tiny-qwen3-vl"]
GENERIC = ["--family", "generic"]


def test_a_video_in_this_process():
    options = {"model": "tiny-qwen3-vl", "family": "generic", "device": "cpu"}
    encoder = pipeline.LocalEncoder(num_frames=4, **options)
    video = encoder(CLIP, start_s=1.0)
    assert video.frames.shape == (4, 272, 640, 3)  # as they are in the file
    T, N = video.record["n_frames"], video.record["tokens_per_frame"]
    assert video.grid is None and video.kept().shape == (T, N) and T == 2
    with pytest.raises(ValueError, match="does not say where in a frame its tokens are"):
        video.picture()
    compared = pipeline.compare(CLIP, methods=["gstep"], num_frames=4, start_s=1.0, **options)
    assert compared.grid is None and torch.equal(compared.rows[0].index, video.pruned.index)
    html = compared.to_html()
    assert "does not say where in a frame its tokens are" in html and 'class="veil"' not in html
    with pytest.raises(VideoFault, match="refuses the video") as error:
        pipeline.encode_video(CLIP, start_s=9.9, fps=1.0, **options)
    assert error.value.fault_class == "too-short"
    with pytest.raises(UsageError, match="refuses the video"):
        pipeline.LocalEncoder(num_frames=1, **options)
    with pytest.raises(UsageError, match="generic does not give token_attention"):
        pipeline.LocalEncoder(pruner="visionzip", num_frames=4, **options)


@pytest.mark.slow
def test_a_cache_of_the_family_generic(one_ray, tmp_path):
    cache, table = tmp_path / "generic", tmp_path / "table"
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / CLIP.name).write_bytes(CLIP.read_bytes())
    argv = [str(tmp_path / "v"), *MODEL, *FRAMES, "--pruner", "none"]
    said_by(prune, *argv, *GENERIC, "--out", cache)
    model = json.loads((cache / "cache.json").read_text())["identity"]["model"]
    assert (model["type"], model["family"]) == ("qwen3_vl", "generic")
    (record,) = (json.loads(path.read_text()) for path in (cache / "runs").glob("*.json"))
    assert record["parity"]["class"] == "Qwen3VLForConditionalGeneration"
    tokens = pipeline.TokenCache(cache)
    assert tokens.metadata(CLIP.name)["model_extra"].keys() == {"record"}

    said_by(prune, *argv, "--out", table)
    assert "family" not in json.loads((table / "cache.json").read_text())["identity"]["model"]
    of_table = pipeline.TokenCache(table).get(CLIP.name)
    of_generic = tokens.get(CLIP.name)
    for a, b in zip((of_table.tokens, *of_table.deepstack), (of_generic.tokens, *of_generic.deepstack), strict=True):
        assert torch.equal(a, b)

    answers = []
    for place in (cache, table):
        asked = pipeline.answer_questions(place, ask=["What moves?"], out=place / "a", max_new_tokens=4, progress=False)
        answers.append(pipeline.read_answers(asked.out)["answer"].to_pylist())
    assert answers[0] == answers[1]
    late = ("--pruner", "vidcom2", "--retention-ratio", "0.5", "--max-new-tokens", "2")
    said_by(generate, cache, "--ask", "Why?", *late, "--out", tmp_path / "late")

    assert "same, 100.0% of the positions" in said_by(verify, cache, "--live", "1", "--video-root", tmp_path / "v")

    none = ("--out", tmp_path / "none")
    ask, late = (cache, "--ask", "Why?", *none), ("--retention-ratio", "0.5")
    refusals = [
        (prune, (*argv, *GENERIC, "--evidence", "token_key", *none), "by the family generic does not give it"),
        (prune, (*argv, "--out", cache), "made with --family generic, and one cache holds one kind of rows"),
        (prune, (*argv, *GENERIC, "--out", table), "made without --family, and one cache holds one kind of rows"),
        (merge, (cache, table, *none), f"'generic', {table} None Merge only caches"),
        (generate, (*ask, "--pruner", "fastv", *late), "not implemented for the family generic"),
    ]
    for command, words, why in refusals:
        assert why in said_by(command, *words, code=2)
    for use in (lambda: make_served_cache(ServeConfig(cache=str(cache))), lambda: pipeline.vllm_options(tokens)):
        with pytest.raises(UsageError, match="vLLM has no class"):
            use()
    with pytest.raises(IdentityMismatch, match="was made with the family qwen3_vl"):
        find_model("the cache", pipeline.TokenCache(table).identity["model"], family="generic")
