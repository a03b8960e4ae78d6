"""The family generic from a video to answers, on a model that also has a family of its own."""

import json

import pytest
import torch

import pipeline
from jobs import generate, merge, prune, verify
from pipeline.errors import IdentityMismatch, UsageError, VideoFault
from pipeline.generate.model import find_model
from pipeline.serve.config import ServeConfig
from pipeline.serve.server import make_served_cache
from tests.builders.clips import sample
from tests.builders.runs import said_by

CLIP = sample("bikes.mp4")
MODEL = ["--model", "tiny-qwen3-vl"]
GENERIC = ["--family", "generic"]
FRAMES = ["--num-frames", "4"]


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
