"""Methods that ask the encoder for more than tokens, end to end: real clips, the cache, and answers from it."""

import shutil

import pytest
import torch

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.evidence import LAST_LAYER, POOLING_HEAD
from jobs import generate, prune
from pipeline import TokenCache
from pipeline.generate.answers import read_answers
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.pipeline.asking import write_questions
from tests.pipeline.rays import ray_here
from tests.pipeline.videos import sample

pytestmark = pytest.mark.slow

FRAMES = 6
CLIPS = ["bikes.mp4", "carphone_pristine.mp4"]
RUNS = [  # tests/pipeline/generate/test_parity.py has the other pairs, without Ray
    ("tiny", "visionzip", [], {"token_attention": LAST_LAYER, "token_key": LAST_LAYER}),
    ("tiny", "fastvid", ["--siglip", "tiny"], {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}),
]


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    with ray_here({"num_cpus": 2}):
        yield


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    for clip in CLIPS:
        shutil.copy(sample(clip), folder)
    return folder


@pytest.mark.parametrize(("model", "method", "options", "evidence"), RUNS)
def test_what_is_stored_is_what_the_method_makes_of_the_encoders_evidence(
    videos, tmp_path, model, method, options, evidence
):
    out = tmp_path / "c"
    argv = [str(videos), "--out", str(out), "--model", model, "--pruner", method, *options, "--num-frames", str(FRAMES)]
    assert prune.main(argv) == 0
    cache, source = TokenCache(out), ModelSource.resolve(model)
    if options:
        source = family_of(source).with_pooling_head("tiny")
        assert cache.identity["model"]["pooling_head"] == source.pooling_head.identity
    assert ("pooling_head" in cache.identity["model"]) == bool(options)
    variant = {"variant": "llava" if model == "tiny" else "qwen"} if method == "fastvid" else {}
    assert cache.identity["pruner"]["params"].items() >= variant.items()
    backbone = family_of(source).load(choose_runtime("cpu", "float32"))
    for clip in CLIPS:
        frames = decode_video(DecodeRequest(videos / clip, Sampling(FRAMES), family_of(source).preprocessor())).frames
        visual = backbone.encode(frames, evidence)
        tokens = visual.tokens.to(torch.bfloat16)
        rounded = {name: value.bfloat16() for name, value in visual.evidence.items()}
        expected = gstep.prune(tokens, 0.25, method, evidence=rounded, **variant)
        video, stored = cache.get(clip), cache.get(clip, order="selection")
        assert torch.equal(video.index, expected.index)
        assert torch.equal(video.tokens.view(torch.int16), expected.tokens.view(torch.int16))
        for ours, level in zip(video.deepstack, visual.deepstack, strict=True):
            assert torch.equal(ours, level.to(torch.bfloat16).flatten(0, 1)[video.index])
        # A method's own order of its tokens in a prompt is the order of the rows.
        own = torch.arange(len(video.index)) if expected.order is None else expected.order
        assert torch.equal(stored.index, expected.index[own])
        assert (expected.order is None) == (method != "visionzip")
        assert torch.equal(video.merged, expected.merged) and 0 < video.merged.sum() < len(video.merged)
        changed = (video.tokens != tokens.flatten(0, 1)[video.index]).any(dim=1)
        assert changed.any() and not (changed & ~video.merged).any()
    if options:
        return
    questions = [{"question_id": clip, "video_id": clip, "prompt": "What is it?"} for clip in CLIPS]
    file = write_questions(tmp_path / "q.jsonl", questions)
    asked = [str(out), "--questions", str(file), "--out", str(tmp_path / "a"), "--model", model]
    assert generate.main([*asked, "--max-new-tokens", "3"]) == 0
    assert [row["status"] for row in read_answers(tmp_path / "a").to_pylist()] == ["ok", "ok"]
