"""Methods that look at the question, from a cache of all tokens of a real clip."""

import json

import pytest
import torch

import gstep
from gstep.backbones import ModelSource, family_of
from gstep.language import Decoding, prompt_builder
from gstep.pruners.fastv import FastV
from jobs import generate
from pipeline import TokenCache
from pipeline.cache.writer import VideoItem
from pipeline.generate.answers import read_answers
from pipeline.generate.model import make_prompt_builder
from pipeline.generate.prompts import VideoMemory
from pipeline.prune.encode_stage import collect_kept_tokens, make_pruning_columns
from tests.builders.answers import request_about, tiny_cache, write_questions
from tests.builders.caches import encode_clip, random_tokens, source_record, write_shard
from tests.builders.runs import clips
from tests.gstep.llms import llm

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question_id": "open", "video_id": "a.mp4", "prompt": "What is happening?"},
    {"question_id": "other", "video_id": "a.mp4", "prompt": "Who is riding?"},
    {"question_id": "choice", "video_id": "a.mp4", "prompt": "Which?", "choices": ["a dog", "two bikes"]},
]
LAYER = {"tiny": 1, "tiny-qwen3-vl": 3}


@pytest.mark.parametrize("model", LAYER)
def test_answers_are_from_what_the_method_keeps(one_ray, model, tmp_path):
    cache, questions = tmp_path / "c", write_questions(tmp_path / "q.jsonl", QUESTIONS)
    source = ModelSource.resolve(model)
    static = {"deepstack_levels": family_of(source).static().deepstack_levels}
    if model != "tiny":
        static["newline"] = None
    store = tiny_cache(cache, (), ratio=1.0, method="none", source=source, failed=("bad",), **static)
    write_shard(store, "run", encode_clip(source, clips()[1], 4, "none", 1.0, "a.mp4")[1])

    def ask(out, *options):
        ways = ["--retention-ratio", "0.25", "--max-new-tokens", "6", "--choices", "loglikelihood", *options]
        assert generate.main([str(cache), "--questions", str(questions), "--out", str(tmp_path / out), *ways]) == 0
        return {row["question_id"]: row for row in read_answers(tmp_path / out).to_pylist()}

    opened = TokenCache(cache)
    visual = opened.get("a.mp4").visual
    build = prompt_builder(source).build
    prompts = [build(QUESTIONS[i]["prompt"], [visual]) for i in range(3)]
    inside = (FastV(K=LAYER[model]), 0.25)
    rows = ask("fastv", "--pruner", "fastv", "--pruner-param", f"K={LAYER[model]}")
    expected = llm(model).generate(prompts[:2], [Decoding(max_new_tokens=6)] * 2, inside=inside)
    assert [rows[name]["answer"] for name in ("open", "other")] == [answer.text for answer in expected]
    (scores,) = llm(model).score(prompts[2:], [["a dog", "two bikes"]], inside=inside)
    assert rows["choice"]["choice_scores"] == pytest.approx([score.logprob for score in scores], abs=1e-4)
    assert {row["retention_ratio"] for row in rows.values()} == {0.25}
    if model == "tiny":
        return

    rows = ask("cdpruner", "--pruner", "cdpruner")
    for question in QUESTIONS[:2]:
        whole = visual.tokens.reshape(visual.n_frames, visual.tokens_per_frame, -1)
        words = llm(model).embedding(question["prompt"])
        evidence = {"image_embedding": whole, "text_embedding": words}
        kept = gstep.prune(whole, 0.25, "cdpruner", evidence=evidence).index
        assert rows[question["question_id"]]["n_visual_tokens"] == len(kept)
    assert not torch.equal(llm(model).embedding("What?"), llm(model).embedding("Who?"))


def test_a_method_with_an_order_of_its_own_is_prompted_in_it(tmp_path):
    """VisionZip: dominant tokens of a frame before its merged ones; with --order index by position."""
    tokens = random_tokens(0, (4, 49, 64))
    rng = torch.Generator().manual_seed(0)
    evidence = {"token_attention": torch.rand(4, 49, generator=rng), "token_key": torch.randn(4, 49, 8, generator=rng)}
    pruned = gstep.prune(tokens, 0.25, "visionzip", evidence=evidence)
    store = tiny_cache(tmp_path / "c", ("other",))
    header = json.loads(store.read("cache.json"))
    header["identity"]["pruner"]["method"] = "visionzip"
    store.put("cache.json", json.dumps(header).encode())
    record = source_record("a", tuple(tokens.shape))
    visual = gstep.VisualTokens(tokens)
    write_shard(
        store, "run", VideoItem({**record, **make_pruning_columns(pruned, visual)}, collect_kept_tokens(pruned, visual))
    )
    rows = [{"question_id": 1, "video_id": "a", "prompt": "What?"}]
    own, plain = (request_about(tmp_path / "c", rows, order=order) for order in ("auto", "index"))
    assert (own.setup.order, plain.setup.order) == ("selection", "index") and own.identity != plain.identity
    opened = TokenCache(tmp_path / "c")
    prompted = VideoMemory(opened, order=own.setup.order).read("a").visual
    assert torch.equal(prompted.tokens, pruned.tokens[pruned.order])
    assert torch.equal(prompted.index, pruned.index[pruned.order]) and not torch.equal(prompted.index, pruned.index)
    merged = pruned.merged[pruned.order]
    for frame in range(4):  # dominant first in each frame
        flags = merged[prompted.index // 49 == frame].tolist()
        assert flags == sorted(flags) and any(flags)
    prompt = make_prompt_builder(own.setup.source, own.config).build("What?", [prompted])
    assert torch.equal(prompt.positions, torch.arange(len(prompt))[None])
    assert torch.equal(VideoMemory(opened, order=plain.setup.order).read("a").tokens, pruned.tokens)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--pruner fastv --pruner-param K=1", "needs --retention-ratio"),
        ("--pruner fastv --retention-ratio 0.25", "this model has 2 layers"),
        ("--pruner cdpruner --retention-ratio 0.25", "--pruner none --evidence cdpruner --siglip"),
        ("--pruner visionzip --retention-ratio 0.25", "--pruner none --evidence visionzip"),
        ("--pruner magic --retention-ratio 0.25", "unknown method 'magic'"),
        ("--pruner fastv --pruner-param alpha=1 --retention-ratio 0.25", "unknown parameter alpha"),
        ("--pruner-param K=1", "--pruner-param goes with --pruner"),
        ("--order own", "has no order of its own"),
    ],
)
def test_what_cannot_be_pruned_late_is_refused(refuse, tmp_path, options, why):
    tiny_cache(tmp_path / "c", ratio=1.0, method="none")
    assert why in refuse(*options.split())


@pytest.mark.parametrize(("method", "ratio"), [("gstep", 0.25), ("vidcom2", 1.0), ("fastvid", 1.0), ("visionzip", 1.0)])
def test_a_cache_that_does_not_hold_every_token_is_refused(refuse, tmp_path, method, ratio):
    """VidCom2 drops tokens at 1 too, and what others merged is no longer the encoder's."""
    tiny_cache(tmp_path / "c", ratio=ratio, method=method)
    said = refuse("--pruner", "fastv", "--pruner-param", "K=1", "--retention-ratio", "0.25")
    assert "jobs.prune --pruner none" in said and (ratio < 1 or f"what {method} kept" in said)
