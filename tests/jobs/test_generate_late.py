"""Methods that look at the question, from a cache of all tokens of a real clip; CDPruner with SigLIP's words."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, SiglipModel

import gstep
from gstep.backbones import ModelSource, family_of
from gstep.checkpoints import tiny
from gstep.language import Decoding, prompt_builder
from gstep.pruners.cdpruner import CDPruner
from gstep.pruners.fastv import FastV
from jobs import generate, prune
from pipeline import TokenCache
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.writer import VideoItem
from pipeline.generate.answerer import Answerer
from pipeline.generate.late_pruning import LatePruning
from pipeline.generate.model import make_prompt_builder
from pipeline.generate.prompts import VideoMemory
from pipeline.generate.questions import AnswerMode, read_questions
from pipeline.prune.encode_stage import collect_kept_tokens, make_pruning_columns
from pipeline.rows import QuestionRecord, drop_nulls
from tests.builders.answers import (
    answers_by_id,
    request_about,
    setup_of,
    tiny_cache,
    tiny_cache_with_embeddings,
    write_questions,
)
from tests.builders.caches import encode_clip, random_tokens, source_record, write_shard
from tests.builders.clips import sample
from tests.builders.runs import clips
from tests.gstep.llms import llm
from tests.jobs.conftest import QUESTION

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question_id": "open", "video_id": "a.mp4", "prompt": "What is happening?"},
    {"question_id": "other", "video_id": "a.mp4", "prompt": "Who is riding?"},
    {"question_id": "choice", "video_id": "a.mp4", "prompt": "Which?", "choices": ["a dog", "two bikes"]},
]


def test_answers_are_from_what_the_method_keeps(one_ray, tmp_path):
    cache, questions, model = tmp_path / "c", write_questions(tmp_path / "q.jsonl", QUESTIONS), "tiny-qwen3-vl"
    source = ModelSource.resolve(model)
    static = {"deepstack_levels": family_of(source).static().deepstack_levels, "newline": None}
    store = tiny_cache(cache, (), ratio=1.0, method="none", source=source, failed=("bad",), **static)
    write_shard(store, "run", encode_clip(source, clips()[1], 4, "none", 1.0, "a.mp4")[1])

    def ask(out, *options):
        ways = ["--retention-ratio", "0.25", "--max-new-tokens", "6", "--choices", "loglikelihood", *options]
        assert generate.main([str(cache), "--questions", str(questions), "--out", str(tmp_path / out), *ways]) == 0
        return answers_by_id(tmp_path / out)

    opened = TokenCache(cache)
    visual = opened.get("a.mp4").visual
    build = prompt_builder(source).build
    prompts = [build(QUESTIONS[i]["prompt"], [visual]) for i in range(3)]
    inside = (FastV(K=3), 0.25)
    rows = ask("fastv", "--pruner", "fastv", "--pruner-param", "K=3")
    expected = llm(model).generate(prompts[:2], [Decoding(max_new_tokens=6)] * 2, inside=inside)
    assert [rows[name]["answer"] for name in ("open", "other")] == [answer.text for answer in expected]
    (scores,) = llm(model).score(prompts[2:], [["a dog", "two bikes"]], inside=inside)
    assert rows["choice"]["choice_scores"] == pytest.approx([score.logprob for score in scores], abs=1e-4)
    assert {row["retention_ratio"] for row in rows.values()} == {0.25}
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
    store = tiny_cache(tmp_path / "c", (), failed=("other",), method="visionzip")
    visual = gstep.VisualTokens(tokens)
    record = {**source_record("a", tuple(tokens.shape)), **make_pruning_columns(pruned, visual)}
    write_shard(store, "run", VideoItem(record, collect_kept_tokens(pruned, visual)))
    own, plain = (request_about(tmp_path / "c", [QUESTION], order=order) for order in ("auto", "index"))
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


RATIO = 0.05
LATE = ["--pruner", "cdpruner", "--retention-ratio", str(RATIO)]
LONG = "Who rides the red bike along the street, past the green tree and the woman in the long coat, to the corner?"
CHOICES = ["a dog", "two bikes"]
CHOSEN = [
    {"question_id": "short", "video_id": "bikes.mp4", "prompt": "What is happening?", "choices": CHOICES},
    {"question_id": "long", "video_id": "bikes.mp4", "prompt": LONG, "choices": CHOICES},
]


@pytest.fixture(scope="module")
def tower():
    return family_of(ModelSource.resolve("tiny")).text_tower("tiny")


@torch.no_grad()
def words_of(text: str) -> torch.Tensor:
    """[Q,64] by the stock model, sixteen tokens a segment with their end."""
    folder = tiny.build("tiny-siglip")
    tokenizer, stock = PreTrainedTokenizerFast.from_pretrained(folder), SiglipModel.from_pretrained(folder).eval()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    rows = [ids[start : start + 15] for start in range(0, len(ids), 15)]
    rows = [row + [tokenizer.eos_token_id] * (16 - len(row)) for row in rows]
    return stock.get_text_features(torch.tensor(rows)).pooler_output


def by_hand(video: CachedVideo, text: str) -> torch.Tensor:
    """Which tokens the question keeps."""
    grid = (video.metadata["n_frames"], video.metadata["tokens_per_frame"])
    tokens, image = (values.unflatten(0, grid) for values in (video.tokens, video.evidence["image_embedding"]))
    evidence = {"image_embedding": image, "text_embedding": words_of(text)}
    return gstep.prune(tokens, RATIO, "cdpruner", evidence=evidence).index


def test_two_questions_on_one_video_are_answered_from_tokens_of_their_own(one_ray, tmp_path):
    (tmp_path / "videos").mkdir()
    shutil.copy(sample("bikes.mp4"), tmp_path / "videos")
    cache, questions = tmp_path / "c", write_questions(tmp_path / "q.jsonl", CHOSEN)
    stored = ["--pruner", "none", "--evidence", "image_embedding", "--siglip", "tiny"]
    assert prune.main([str(tmp_path / "videos"), "--out", str(cache), "--num-frames", "3", *stored]) == 0
    asked = ["--questions", str(questions), "--out", str(tmp_path / "a"), "--choices", "loglikelihood"]
    assert generate.main([str(cache), *asked, *LATE, "--siglip", "tiny"]) == 0
    rows = answers_by_id(tmp_path / "a")
    opened = TokenCache(cache)
    video = opened.get("bikes.mp4", evidence=["image_embedding"])
    kept = {question["question_id"]: by_hand(video, question["prompt"]) for question in CHOSEN}
    assert len(words_of(LONG)) > 1 and not torch.equal(kept["short"], kept["long"])
    visual = video.visual

    def scores(question, index):
        chosen = replace(visual, tokens=visual.tokens[index], index=index)
        prompt = prompt_builder(ModelSource.resolve("tiny")).build(question["prompt"], [chosen])
        return [score.logprob for score in llm("tiny").score([prompt], [CHOICES])[0]]

    for question, other in zip(CHOSEN, CHOSEN[::-1], strict=True):
        row, own = rows[question["question_id"]], kept[question["question_id"]]
        assert row["n_visual_tokens"] == len(own) + 1 == int(RATIO * 3 * 196) + 1
        assert row["choice_scores"] == pytest.approx(scores(question, own), abs=1e-4)
        assert row["choice_scores"] != pytest.approx(scores(question, kept[other["question_id"]]), abs=1e-2)


EMBEDDED = (("image_embedding", "image_embedding"),)


@pytest.fixture
def answer(tower, tmp_path):
    """Answer these prompts about the video of a made-up cache; returns the rows."""

    def run(*prompts):
        store = tiny_cache_with_embeddings(tmp_path / "c", head=tower.head.identity)
        rows = [{"question_id": i, "video_id": ["a", "a"], "prompt": text} for i, text in enumerate(prompts)]
        table = read_questions(str(write_questions(tmp_path / "q.jsonl", rows)), AnswerMode(Decoding(max_new_tokens=2)))
        actor = Answerer(setup_of(store, prunings={"": LatePruning(CDPruner(), 0.1, tower, EMBEDDED)}))
        return list(actor.answer([{**drop_nulls(row, QuestionRecord), "attempts": 1} for row in table.to_pylist()]))

    return run


def test_a_question_without_a_word_is_an_error_row_and_costs_no_other(answer):
    rows = {row["question_id"]: row for row in answer("What?", "?!")}
    assert rows["0"]["status"] == "ok", rows["0"]
    assert rows["0"]["n_visual_tokens"] == 2 * (int(0.1 * 4 * 49) + 1)
    assert (rows["1"]["error_class"], rows["1"]["retryable"]) == ("bad-prompt", False)
    assert "the question '?!' has no word that SigLIP's tokenizer knows" in rows["1"]["error_message"]


def test_what_lacks_is_named_with_its_remedy(refuse, tmp_path, tower):
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    said = refuse(*LATE, "--siglip", "tiny")
    assert "python -m jobs.prune --pruner none --evidence cdpruner --siglip MODEL" in said
    shutil.rmtree(tmp_path / "c")
    tiny_cache_with_embeddings(tmp_path / "c", head=tower.head.identity)
    assert "name it with --siglip, for the published models google/siglip" in refuse(*LATE)
    assert "is no folder on this machine" in refuse(*LATE, "--siglip", "nowhere/at/all")


def test_words_of_another_checkpoint_than_the_patches_are_refused(refuse, tmp_path, tower):
    tiny_cache_with_embeddings(tmp_path / "c", head=tower.head.identity)
    folder = Path(shutil.copytree(tiny.build("tiny-siglip"), tmp_path / "siglip"))
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_model.head.probe"] += 1
    save_file(tensors, folder / "model.safetensors")
    said = refuse(*LATE, "--siglip", str(folder), read=True)
    assert tower.head.identity in said and "compared where both are from one checkpoint" in said


def test_the_tower_is_part_of_what_answers_were_made_with(tmp_path, tower):
    tiny_cache_with_embeddings(tmp_path / "c", head=tower.head.identity)
    job = request_about(tmp_path / "c", [QUESTION], pruner="cdpruner", retention_ratio=0.1, siglip="tiny")
    said = {"method": "cdpruner", "params": {"mode": "global"}, "text_tower": tower.identity}
    assert job.identity["pruner"] == said
