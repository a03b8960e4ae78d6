"""Both jobs end to end with the Qwen families: odd frame counts, deepstack levels, what positions need, answers."""

import shutil

import pytest
import torch

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.language import Decoding, prompt_builder
from jobs import generate, inspect, prune
from pipeline import TokenCache
from pipeline.generate.answers import read_answers
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.answers import write_questions
from tests.builders.clips import sample
from tests.builders.runs import forbid_ray, said_by
from tests.gstep.llms import llm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

FRAMES = 5
CLIPS = ["bikes.mp4", "carphone_pristine.mp4"]


@pytest.fixture(scope="module", params=["tiny-qwen2-5-vl", "tiny-qwen3-vl"])
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def first(model, tmp_path_factory):
    """One finished run: (its command line, its folder of videos, its cache, what it printed)."""
    folder, out = tmp_path_factory.mktemp("videos"), tmp_path_factory.mktemp("out") / "c"
    for clip in CLIPS:
        shutil.copy(sample(clip), folder)
    argv = [str(folder), "--out", str(out), "--model", model, "--num-frames", str(FRAMES)]
    return argv, folder, out, said_by(prune, *argv)


def test_the_stored_tokens_are_the_readable_form_on_the_same_encoder_output(first, monkeypatch, model):
    argv, folder, out, printed = first
    cache = TokenCache(out)
    assert cache.video_ids == CLIPS
    assert cache.newline is None and cache.header["hidden_size"] == 64

    source = ModelSource.resolve(model)
    preprocessor, backbone = family_of(source).preprocessor(), family_of(source).load(choose_runtime("cpu", "float32"))
    n_bytes = 0
    for clip in CLIPS:
        frames = decode_video(DecodeRequest(folder / clip, Sampling(FRAMES), preprocessor)).frames
        visual = backbone.encode(frames)
        expected = gstep.prune(visual.tokens.to(torch.bfloat16), 0.25)
        video = cache.get(clip)
        assert torch.equal(video.index, expected.index) and torch.equal(video.rank, expected.rank)
        assert torch.equal(video.tokens.view(torch.int16), expected.tokens.view(torch.int16))
        assert len(video.deepstack) == cache.deepstack_levels == len(visual.deepstack)
        for ours, level in zip(video.deepstack, visual.deepstack, strict=True):
            assert torch.equal(ours, level.to(torch.bfloat16).flatten(0, 1)[video.index])
        row = video.metadata
        assert (row["n_frames"], len(row["timestamps"])) == (3, FRAMES)
        sides = [side // preprocessor.patch_size for side in frames.shape[1:3]]
        assert row["model_extra"]["video_grid_thw"] == [3, *sides]
        n_bytes += row["n_tokens"] * 64 * 2 * (1 + cache.deepstack_levels)
    assert f"{n_bytes:,} of tokens" in printed  # levels counted
    extra = cache.metadata("bikes.mp4")["model_extra"]
    if model == "tiny-qwen3-vl":
        assert extra["patch_timestamps"] == pytest.approx([1.24, 6.2, 9.96])  # frames 0, 62, 124, 186 and 249 at 25/s
    else:
        assert extra["second_per_grid_ts"] == 2 / (FRAMES / 250 * 25.0)
    assert "0, 62" in said_by(inspect, out, "bikes.mp4")
    forbid_ray(monkeypatch)
    assert "2 of 2 videos are in the cache already" in said_by(prune, *argv)


def test_they_answer_from_their_caches(first, model, tmp_path, monkeypatch):
    cache, out, questions = first[2], tmp_path / "o", tmp_path / "q.jsonl"
    rows = [{"question_id": i, "video_id": ["bikes.mp4"] * (1 + i), "prompt": "What is special?"} for i in range(2)]
    rows += [{"question_id": 2, "video_id": "bikes.mp4", "prompt": "Which?", "choices": ["a dog", "a bike"]}]
    write_questions(questions, rows)
    argv = [str(cache), "--questions", str(questions), "--out", str(out), "--retention-ratio", "0.10"]
    argv += ["--max-new-tokens", "6"]
    said_by(generate, *argv)
    opened, answers = TokenCache(cache), {row["question_id"]: row for row in read_answers(out).to_pylist()}
    visual = opened.get("bikes.mp4", 0.10).visual
    assert len(visual.deepstack) == (3 if model == "tiny-qwen3-vl" else 0)
    build = prompt_builder(ModelSource.resolve(model)).build
    prompts = [build("What is special?", [visual] * count) for count in (1, 2)]
    expected = llm(model).generate(prompts, [Decoding(max_new_tokens=6)] * 2)
    assert [answers[name]["answer"] for name in ("0", "1")] == [answer.text for answer in expected]
    assert [answers[name]["n_visual_tokens"] for name in ("0", "1")] == [len(visual.index), 2 * len(visual.index)]
    assert answers["2"]["answer"] in ("A", "B")
    forbid_ray(monkeypatch)
    said_by(generate, *argv, "--rule", "vllm", code=2)  # another policy, other answers
