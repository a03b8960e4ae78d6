"""The actor that answers: what it says is what the model says, and one question's fault costs no other question."""

import json
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch

from gstep.backbones import ModelSource, choose_runtime
from gstep.checkpoints import tiny
from gstep.language import Decoding, prompt_builder
from gstep.pruners.cdpruner import CDPruner
from gstep.pruners.fastv import FastV
from pipeline import TokenCache
from pipeline.generate.answerer import (
    ANSWERED_SCHEMA,
    GROW_AFTER,
    Answerer,
    BatchSize,
    group_by_videos,
    pack_blocks,
    unpack_answers,
)
from pipeline.generate.answers import AnswersTable, commit_answers
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines.transformers import TransformersEngine
from pipeline.generate.job import plan_answers
from pipeline.generate.late_pruning import LatePruning
from pipeline.generate.questions import AnswerMode, read_given_questions
from pipeline.generate.summary import summarize_answers
from pipeline.runner import worker_heartbeat as heartbeat
from pipeline.storage.stores import LocalStore
from tests.builders.answers import SHAPE, sent, setup_of, tiny_cache, tiny_qwen_cache
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.gstep.llms import llm
from tests.pipeline.damage import flip

WAY = AnswerMode(Decoding(max_new_tokens=8))
PROMPTS = ["What?", "What is happening in this video, and why?", "Who is it?", "Where?", "Say more about the end."]


@pytest.fixture
def cache(tmp_path):
    return tiny_cache(tmp_path / "c", ("a", "b"))


def questions(rows, way=WAY):
    return sent(read_given_questions(rows, way))


def open_questions(count=10, way=WAY, **more):
    """On the two videos of the cache in turn."""
    rows = [{"question_id": i, "video_id": "ab"[i % 2], "prompt": PROMPTS[i % 5] * (1 + i % 3)} for i in range(count)]
    return questions([{**row, **more} for row in rows], way)


def by_id(rows):
    return {row["question_id"]: row for row in rows}


def test_an_answer_is_the_models_on_the_cached_tokens(cache, tmp_path):
    rows = by_id(Answerer(setup_of(cache, retention_ratio=0.10)).answer(open_questions(2)))
    opened = TokenCache(tmp_path / "c")
    build = prompt_builder(ModelSource.resolve("tiny")).build
    for name, question_id in (("a", "0"), ("b", "1")):
        video = opened.get(name, 0.10).visual
        assert len(video.tokens) == SHAPE[0] * SHAPE[1] // 10
        prompt = build(rows[question_id]["prompt"], [video])
        (expected,) = llm("tiny").generate([prompt], [WAY.decoding])
        row = rows[question_id]
        assert (row["answer"], row["n_new_tokens"], row["finish"]) == (
            expected.text, len(expected.token_ids), expected.finish
        )  # fmt: skip
        assert (row["n_prompt_tokens"], row["n_visual_tokens"]) == (len(prompt), len(video.tokens) + 1)
        assert (row["retention_ratio"], row["batch_size"]) == (0.10, 2)


TALK = [
    {"role": "user", "content": "Who is it?"},
    {"role": "assistant", "content": "A dog."},
    {"role": "user", "content": "What does it do?"},
]


def test_a_conversation_is_answered_and_its_choices_scored_by_the_models_own_template(cache, tmp_path):
    rows = [
        {"question_id": "open", "video_id": "a", "messages": TALK, "system": "Be brief."},
        {"question_id": "two", "video_id": ["b", "a"], "messages": TALK},
        {"question_id": "texts", "video_id": "a", "messages": TALK, "choices": ["it runs", "it sits"]},
    ]
    asked = questions(rows[:2]) + questions(rows[2:], AnswerMode(Decoding(), "loglikelihood"))
    answers = by_id(Answerer(setup_of(cache)).answer(asked))
    opened, builder = TokenCache(tmp_path / "c"), prompt_builder(ModelSource.resolve("tiny"))
    one, two = (opened.get(name).visual for name in ("a", "b"))

    def build(visuals, *system):
        contents = [[{"type": "text", "text": turn["content"]}] for turn in TALK]
        contents[0] = [{"type": "video"}] * len(visuals) + contents[0]
        turns = [{"role": turn["role"], "content": part} for turn, part in zip(TALK, contents, strict=True)]
        return builder.build_chat([*system, *turns], visuals)

    brief = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    for name, prompt in (("open", build([one], brief)), ("two", build([two, one]))):
        (expected,) = llm("tiny").generate([prompt], [WAY.decoding])
        assert (answers[name]["answer"], answers[name]["n_prompt_tokens"]) == (expected.text, len(prompt))
        assert answers[name]["prompt"] == "What does it do?" and len(json.loads(answers[name]["conversation"])) == 3
    (scores,) = llm("tiny").score([build([one])], [rows[2]["choices"]])
    assert answers["texts"]["choice_scores"] == pytest.approx([score.logprob for score in scores], abs=1e-4)


def test_choices_that_carry_their_letters_are_asked_without_and_stored_with_them(cache):
    plain, labeled = ["square", "star"], ["(A) square", "(B) star"]
    rows = [
        {"question_id": i, "video_id": "a", "prompt": "Which?", "choices": c} for i, c in enumerate((plain, labeled))
    ]
    first, second = Answerer(setup_of(cache)).answer(questions(rows, AnswerMode(Decoding(4))))
    assert second["choices"] == labeled  # as in the file, so that answers of earlier versions are resumed
    same = ("prompt", "n_prompt_tokens", "answer", "choice")
    assert [first[name] for name in same] == [second[name] for name in same]


def test_cdpruner_takes_the_last_message_for_the_question_and_fastv_the_whole_prompt(tmp_path):
    cache, source = tiny_qwen_cache(tmp_path / "w"), ModelSource.resolve("tiny-qwen2-5-vl")
    rows = [
        {"question_id": "talk", "video_id": "a", "messages": TALK},
        {"question_id": "alone", "video_id": "a", "prompt": TALK[2]["content"]},
        {"question_id": "first", "video_id": "a", "prompt": TALK[0]["content"]},
    ]

    def answer(method):
        setup = setup_of(cache, source=source, prunings={"": LatePruning(method, 0.25)})
        return by_id(Answerer(setup).answer(questions(rows)))

    kept = {name: row["kept_per_frame"] for name, row in answer(CDPruner()).items()}
    assert kept["talk"] == kept["alone"] != kept["first"]
    inside = answer(FastV(K=1))
    assert {row["status"] for row in inside.values()} == {"ok"} and inside["talk"]["n_kept"] == 24


def test_a_long_question_neither_joins_short_ones_nor_makes_their_batches_small(cache):
    rows = [{"question_id": i, "video_id": "ab"[i % 2], "prompt": PROMPTS[i % 5]} for i in range(18)]
    for i in (3, 12):
        rows[i]["prompt"] = "why is it " * 2200
    decoding = AnswerMode(Decoding(max_new_tokens=1))
    answers = by_id(Answerer(setup_of(cache)).answer(questions(rows, decoding)))
    assert {i: answers[str(i)]["batch_size"] for i in range(18)} == {i: 1 if i in (3, 12) else 8 for i in range(18)}
    assert min(answers["3"]["n_prompt_tokens"], answers["12"]["n_prompt_tokens"]) > 6_000


def test_a_batch_of_ragged_prompts_says_what_each_alone_does(cache):
    way = AnswerMode(Decoding(max_new_tokens=8), "letter")
    asked = open_questions(10)
    asked += open_questions(6, AnswerMode(Decoding(max_new_tokens=8, temperature=1.5)), max_new_tokens=5)
    asked += open_questions(4, way, choices=["yes", "no", "perhaps"])
    asked += open_questions(4, AnswerMode(Decoding(), "loglikelihood"), choices=["yes, always", "no"])
    asked = [{**question, "question_id": str(i)} for i, question in enumerate(asked)]
    together, alone = (by_id(Answerer(setup_of(cache, batch_size=n)).answer(asked)) for n in (8, 1))
    assert together.keys() == alone.keys() == {str(i) for i in range(24)}
    assert {row["batch_size"] for row in alone.values()} == {1}
    assert max(row["batch_size"] for row in together.values()) == 8
    assert {row["status"] for row in together.values()} == {"ok"}
    for key in ("answer", "choice", "finish", "n_new_tokens", "choice_tokens"):
        assert {name: row.get(key) for name, row in together.items()} == {
            name: row.get(key) for name, row in alone.items()
        }
    for name, row in together.items():
        assert row.get("choice_scores", []) == pytest.approx(alone[name].get("choice_scores", []), abs=1e-3)
    assert len({row["answer"] for row in together.values()}) > 5  # or the comparison would say nothing


def test_choices_by_letter_and_by_text(cache):
    row = {"question_id": 1, "video_id": "a", "prompt": "Which?", "choices": ["yes", "no, never at all", "no"]}
    answers = {}
    for method in ("letter", "loglikelihood", "generate"):
        (answers[method],) = Answerer(setup_of(cache)).answer(questions([row], AnswerMode(Decoding(4), method)))
    letter, text = answers["letter"], answers["loglikelihood"]
    scores = letter["choice_scores"]
    assert letter["answer"] == "ABC"[letter["choice"]] and letter["choice"] == scores.index(max(scores))
    assert letter["choice_tokens"] == [1, 1, 1] and letter.get("choice_normalised") is None
    scores, counts = text["choice_scores"], text["choice_tokens"]
    assert text["answer"] == row["choices"][text["choice"]] and text["choice"] == scores.index(max(scores))
    assert counts[1] > counts[2] and scores[1] < scores[2]  # longer and, by its sum, less likely
    means = [score / count for score, count in zip(scores, counts, strict=True)]
    assert text["choice_normalised"] == means.index(max(means))
    assert letter["n_prompt_tokens"] > text["n_prompt_tokens"]  # the options stand in the prompt
    assert answers["generate"]["n_prompt_tokens"] == letter["n_prompt_tokens"]
    assert answers["generate"]["n_new_tokens"] > 0 and answers["generate"].get("choice_scores") is None


@pytest.mark.parametrize("method", ["loglikelihood", "generate"])
def test_scores_that_are_no_numbers_are_no_answer(tmp_path, method):
    """The tokens of video a are beyond float16: every choice would be as likely, and the first one the answer."""
    cache = tiny_cache(
        tmp_path / "c", draw=lambda number, shape: random_tokens(number, shape) * 10.0 ** (6 - 6 * number)
    )
    asked = [
        {"question_id": i, "video_id": "ab"[i % 2], "prompt": "Which?", "choices": ["yes", "no"]} for i in range(4)
    ]
    setup = replace(setup_of(cache), dtype="float16")
    rows = by_id(Answerer(setup).answer(questions(asked, AnswerMode(Decoding(4), method))))
    assert {name: row["status"] for name, row in rows.items()} == {"0": "failed", "1": "ok", "2": "failed", "3": "ok"}
    assert rows["0"]["error_class"] == "internal" and "no numbers (NaN)" in rows["0"]["error_message"]


@pytest.fixture
def failing(cache):
    """Makes an actor whose engine, the real one, fails as told, and the sizes of the batches that it is given."""

    def make(failure, **options):
        engine, sizes = TransformersEngine(llm("tiny"), choose_runtime("cpu", "float32")), []
        answers = engine.generate

        def generate(prompts, decodings, **more):
            sizes.append(len(prompts))
            failure(prompts)
            return answers(prompts, decodings, **more)

        engine.generate = generate
        return Answerer(setup_of(cache, **options), engine=engine), sizes

    return make


def too_many(fitting, error=None):
    """A failure of batches of more questions than fit the memory."""

    def failure(prompts):
        if len(prompts) > fitting:
            raise error or torch.OutOfMemoryError("out of memory")

    return failure


def test_answers_are_handed_over_while_others_are_asked_in_the_same_parts_whatever_batches_are_made(failing):
    """One question fits the memory at once; the second is one that no model is asked."""
    asked = open_questions(5)
    asked[1] |= {"video_ids": ["gone"]}
    actor, sizes = failing(too_many(1), batch_size=2)
    parts = actor(pack_blocks([asked])[0])
    first, n_asked = unpack_answers(next(parts)), len(sizes)
    rows = [first, *map(unpack_answers, parts)]
    assert n_asked < len(sizes)
    assert [part["question_id"].to_pylist() for part in rows] == [["0", "1"], ["2", "3"], ["4"]]
    assert {part.schema for part in rows} == {ANSWERED_SCHEMA}
    assert first["status"].to_pylist() == ["ok", "failed"] and first["answer"].to_pylist()[0]


@pytest.mark.parametrize("error", [None, MemoryError("cannot"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_a_batch_that_does_not_fit_is_halved_and_so_are_the_next(failing, error):
    actor, sizes = failing(too_many(2, error))
    rows = list(actor.answer(open_questions(14)))
    assert [row["status"] for row in rows] == ["ok"] * 14
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2]


def test_memory_that_runs_out_while_pruning_for_a_question_is_named_so(failing):
    actor, _ = failing(too_many(8), prunings={"": LatePruning(CDPruner(), 0.25)})
    actor._engine.embedding = too_many(0)
    (row,) = actor.answer(open_questions(1))
    assert (row["error_class"], row["retryable"]) == ("out-of-memory", True)


def test_larger_batches_are_tried_again_after_a_while():
    size = BatchSize(8)
    size.adjust(n_fitted=2, is_short=True)
    assert size.now == 2
    for n_batches, now in ((GROW_AFTER, 4), (9 * GROW_AFTER, 8)):
        for _ in range(n_batches):
            size.adjust(n_fitted=size.now, is_short=False)
        assert size.now == now


@pytest.mark.parametrize(
    ("error", "error_class", "sizes"),
    [
        (torch.OutOfMemoryError("full"), "out-of-memory", [8, 4, 2, 2, 1, 1, 4, 4]),  # then as many as fitted
        (RuntimeError("cannot count"), "internal", [8, *[1] * 8, 4]),
    ],
)
def test_what_one_question_meets_costs_no_other(failing, error, error_class, sizes):
    def fail_long(prompts):
        if max(map(len, prompts)) >= 200:
            raise error

    actor, asked_sizes = failing(fail_long)
    asked = open_questions(12)
    asked[3]["prompt"] *= 100
    rows = by_id(actor.answer(asked))
    assert [name for name, row in rows.items() if row["status"] != "ok"] == ["3"] and len(rows) == 12
    assert rows["3"]["error_class"] == error_class and str(error) in rows["3"]["error_message"]
    assert rows["3"]["retryable"]
    assert asked_sizes == sizes


def test_a_poisoned_gpu_ends_the_actor_so_that_ray_starts_another(failing, monkeypatch):
    def poisoned(prompts):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def exit_at_once(code):
        raise SystemExit(code)

    monkeypatch.setattr(heartbeat.os, "_exit", exit_at_once)
    actor, sizes = failing(poisoned)
    with pytest.raises(SystemExit, match="70"):
        list(actor.answer(open_questions(4)))
    assert sizes == [4]


@pytest.fixture
def short(tmp_path):
    """Makes the setup of an actor whose model knows so many positions."""

    def make(positions: int):
        folder = shutil.copytree(tiny.build("tiny"), tmp_path / "short")
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = positions
        (folder / "config.json").write_text(json.dumps(config))
        source = ModelSource.resolve(folder)
        return replace(setup_of(tiny_cache(tmp_path / "c", source=source)), source=source)

    return make


def test_a_prompt_that_cannot_be_built_or_does_not_fit_is_named(short):
    setup = short(120)
    asked = open_questions(3)
    asked[1]["prompt"] = "Why? " * 60
    asked[2]["prompt"] = "Is this a \U0010fffe ?"
    asked.append({**asked[0], "question_id": "3", "decoding": asked[0]["decoding"].replace("8", "60")})
    scored = AnswerMode(Decoding(), "loglikelihood")
    (long,) = open_questions(1, scored, choices=["no", "yes, always " * 60])
    asked.append({**long, "question_id": "4"})
    rows = by_id(Answerer(setup).answer(asked))
    assert [rows[str(i)].get("error_class") for i in range(5)] == [
        None, "prompt-too-long", "bad-prompt", "prompt-too-long", "prompt-too-long"
    ]  # fmt: skip
    assert "do not fit the model's 120" in rows["1"]["error_message"]
    assert rows["1"]["n_visual_tokens"] == 50 and not rows["1"]["retryable"]


def test_positions_that_the_model_does_not_know_are_refused(short):
    setup = short(200)  # a quarter of 196 tokens fits, all of them do not
    for positions, error_class in (("contiguous", None), ("original", "prompt-too-long")):
        actor = Answerer(replace(setup, config=replace(setup.config, positions=positions)))
        (row,) = actor.answer(open_questions(1))
        assert row.get("error_class") == error_class
    assert "use --positions contiguous" in row["error_message"]


def test_a_damaged_shard_costs_the_questions_on_its_videos(tmp_path):
    store = tiny_cache(tmp_path / "c", ("a",))
    before = set((tmp_path / "c" / "tokens").iterdir())
    write_shard(store, "run2", encoded("b", random_tokens(1, SHAPE), 0.25, "gstep"))
    write_shard(store, "run3", encoded("gone", random_tokens(2, SHAPE), 0.25, "gstep"))
    damaged, removed = sorted(set((tmp_path / "c" / "tokens").iterdir()) - before)
    flip(damaged, damaged.stat().st_size // 2)
    removed.unlink()
    asked = open_questions(4)
    asked.append({**asked[0], "question_id": "4", "video_ids": ["gone"]})
    rows = by_id(Answerer(setup_of(store)).answer(asked))
    assert [rows[str(i)].get("error_class") for i in range(5)] == [None, "corrupt", None, "corrupt", "corrupt"]
    assert rows["1"]["retryable"]


def test_an_answer_tells_the_decode_warnings_of_its_videos(cache, tmp_path):
    """Under each pruning, and 0 where there were none; the summary counts the answers."""
    write_shard(cache, "later", encoded("c", random_tokens(5, SHAPE), 0.25, "gstep", decode_warnings=3))
    rows = [
        {"question_id": "one", "video_id": "a", "prompt": "p"},
        {"question_id": "broken", "video_id": "c", "prompt": "p"},
        {"question_id": "both", "video_id": ["c", "a", "c"], "prompt": "p <video> p <video> p <video>"},
    ]
    asked = questions(rows)
    answers = by_id(Answerer(setup_of(cache)).answer(asked))
    assert {name: row["decode_warnings"] for name, row in answers.items()} == {"one": 0, "broken": 3, "both": 6}
    store = LocalStore(tmp_path / "answers")
    store.make()
    commit_answers(store, "run", 0, list(answers.values()))
    live = AnswersTable(store).live()
    summary = summarize_answers(live, 3, set(), 0.0)
    assert (summary.n_warned, summary.n_warned_videos, summary.warned) == (2, 2, ["c + a + c", "c"])
    said = " ".join(str(summary).split())
    assert "2 answers are about videos that were decoded with warnings (c + a + c, c): their frames" in said


def test_questions_on_a_video_stay_together_unless_they_are_many_and_those_under_one_pruning_next_to_each_other():
    """Whoever answers them shares what goes before the question: the tokens that the pruning keeps."""

    def ids(rows, most):
        return [[row["question_id"] for row in block] for block in group_by_videos(rows, most)]

    rows = [{"question_id": i, "video_ids": [v]} for i, v in enumerate("abcabcabaa")]
    assert ids(rows, 4) == [[0, 3, 6, 8], [9, 1, 4, 7], [2, 5]]
    assert ids(rows, 100) == [[0, 3, 6, 8, 9, 1, 4, 7, 2, 5]]
    assert ids([], 4) == []
    every = [(f"{video}{i}{pruning}", video, pruning) for video in "ba" for i in range(2) for pruning in "zy"]
    rows = [{"question_id": name, "video_ids": [video], "pruning": pruning} for name, video, pruning in every]
    a, b = ["a0z", "a1z", "a0y", "a1y"], ["b0z", "b1z", "b0y", "b1y"]
    assert ids(rows, 100) == [a + b] and ids(rows, 4) == [a, b]
    assert ids(rows, 2) == [a[:2], a[2:], b[:2], b[2:]]


def test_all_models_fit_a_cluster_at_once_every_gpu_gets_one_and_a_block_is_whole_batches():
    for cpus, gpus, n_questions, workers in product((1, 64), (0, 1, 8), (1, 40, 10**6), (None, 3)):
        plan = plan_answers(cpus, gpus, n_questions, GenerateConfig(questions="q.jsonl", workers=workers))
        assert 1 <= plan.answer.workers <= max(gpus, workers or 1)
        assert plan.cpus <= cpus and plan.gpus <= gpus
        assert plan.answer.workers * plan.questions_per_block <= max(n_questions, 8 * plan.answer.workers)
    assert plan_answers(64, 8, 10**4, GenerateConfig(questions="q.jsonl")).answer.workers == 8
    for batch_size, per_shard, block in ((128, 64, 128), (48, 64, 48), (8, 20, 16), (1, 3, 3)):
        config = GenerateConfig(questions="q.jsonl", batch_size=batch_size, questions_per_shard=per_shard)
        assert plan_answers(8, 2, 10**4, config).questions_per_block == block
