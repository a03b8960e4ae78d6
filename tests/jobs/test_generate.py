"""Questions answered end to end: a cache by jobs.prune from real clips, then jobs.generate on a real Ray."""

import json
import os
import shutil
import signal
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gstep.backbones import ModelSource
from jobs import generate, prune
from pipeline import answer_questions
from pipeline.generate import run
from pipeline.generate.answers import AnswersTable, read_answers
from pipeline.storage.stores import LocalStore, store_at
from tests.builders.answers import answers_by_id, write_questions
from tests.builders.runs import clips, document_of, family, forbid_ray, said_by
from tests.builders.stores import SECRET, S3Server
from tests.jobs.faults import begin_forked, fork

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

FRAMES = 4
WORKER = "ray::MapWorker(MapBatches(Answerer))"
TOKENS = FRAMES * 196 // 10 + 1  # a video at ratio 0.10, and its newline
VIDEOS = ("bikes.mp4", "bigbuckbunny.mp4")
OPTIONS = ("--retention-ratio", "0.10", "--max-new-tokens", "6")


def asked() -> list[dict]:
    """Open questions, greedy and drawn, questions with choices, and some that fail each in its way."""
    rows = [{"video_id": VIDEOS[i % 2], "prompt": f"What is {'so ' * (i % 3)}special?"} for i in range(8)]
    rows += [{"video_id": VIDEOS[i % 2], "prompt": "And then?", "temperature": 1.5} for i in range(4)]
    rows += [{"video_id": VIDEOS[0], "prompt": "Which?", "choices": ["a dog", "a bike", "a house"]}]
    rows += [{"video_id": list(VIDEOS), "prompt": "Compare them.", "topic": "both"}]
    rows += [{"video_id": video, "prompt": "Where?"} for video in ("text.mp4", "gone.mp4")]
    rows += [{"video_id": VIDEOS[1], "prompt": "This \U0010fffe is no character."}]
    return [{"question_id": f"q{i:02}", **row} for i, row in enumerate(rows)]


FAILURES = {"q14": "failed-video", "q15": "unknown-video", "q16": "bad-prompt"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Two real clips and a file that is no video, as jobs.prune caches them at 0.25."""
    folder = tmp_path_factory.mktemp("videos")
    for clip in clips():
        if clip.name in VIDEOS:
            shutil.copy(clip, folder)
    (folder / "text.mp4").write_text("this is no video\n" * 50)
    out = tmp_path_factory.mktemp("cache") / "c"
    assert prune.main([str(folder), "--out", str(out), "--num-frames", str(FRAMES)]) == 0
    return out


def argv_of(cache: Path, questions: Path, out: Path) -> list[str]:
    return [str(cache), "--questions", str(questions), "--out", str(out), *OPTIONS]


def ask(*given: Path, options: tuple[str, ...] = (), code: int = 0) -> str:
    """What jobs.generate says, asked of a cache, a file of questions and a place for answers."""
    return said_by(generate, *argv_of(*given), *options, code=code)


@pytest.fixture(scope="module")
def first(cache, tmp_path_factory) -> tuple[Path, Path]:
    """(questions, answers) of one finished run."""
    folder = tmp_path_factory.mktemp("first")
    questions = write_questions(folder / "q.jsonl", asked())
    ask(cache, questions, folder / "answers")
    return questions, folder / "answers"


def test_every_question_has_its_answer_or_the_reason_and_the_run_its_record(first):
    rows = answers_by_id(first[1])
    assert sorted(rows) == [row["question_id"] for row in asked()]
    assert {name: row["error_class"] for name, row in rows.items() if row["status"] != "ok"} == FAILURES
    for name, row in rows.items():
        if name not in FAILURES:
            videos = len(row["video_ids"])
            assert row["n_visual_tokens"] == videos * TOKENS < row["n_prompt_tokens"]
            assert (row["retention_ratio"], row["attempts"]) == (0.10, 1)
    assert rows["q00"]["answer"] and 1 <= rows["q00"]["n_new_tokens"] <= 6
    assert rows["q12"]["answer"] == "ABC"[rows["q12"]["choice"]] and len(rows["q12"]["choice_scores"]) == 3
    assert (rows["q13"]["topic"], rows["q00"]["topic"]) == ("both", None)
    assert "text.mp4" in rows["q14"]["error_message"] and "unsupported" in rows["q14"]["error_message"]
    assert max(row["batch_size"] or 0 for row in rows.values()) > 3
    (record,) = [json.loads(path.read_text()) for path in (first[1] / "runs").iterdir()]
    assert record["status"] == "finished" and record["summary"]["n_ok"] == 14
    assert record["summary"]["failures"] == {"failed-video": 1, "unknown-video": 1, "bad-prompt": 1}
    (runtime,) = record["runtimes"]
    whole = ModelSource.resolve("tiny").file("model.safetensors").stat().st_size
    assert runtime["device"] == "cpu" and 0 < runtime["model_bytes"] < whole
    identity = json.loads((first[1] / "answers.json").read_text())["identity"]
    assert (identity["retention_ratio"], identity["prompt"]["positions"]) == (0.10, "contiguous")
    assert identity["cache"]["retention_ratio"] == 0.25


def test_nothing_is_asked_twice_and_a_changed_question_is_refused(first, cache, tmp_path, monkeypatch):
    forbid_ray(monkeypatch)
    before = sorted(first[1].rglob("*"))
    said = ask(cache, *first)
    assert "17 of 17 questions have their answers already" in said and "14 answered, 3 failed, 0 without a row" in said
    code, record, _ = document_of(generate, argv_of(cache, *first))
    assert (code, record["n_questions"], record["n_ok"], record["n_failed"], record["n_new"]) == (0, 17, 14, 3, 0)
    assert (record["failures"], record["out"]) == (dict.fromkeys(FAILURES.values(), 1), str(first[1]))
    changed = write_questions(tmp_path / "q.jsonl", [{**asked()[0], "prompt": "Something else?"}])
    assert "q00: prompt was 'What is special?', is 'Something else?'" in ask(cache, changed, first[1], code=2)
    assert sorted(first[1].rglob("*")) == before


def test_every_video_is_asked_the_same_without_a_file_and_goes_on_so(cache, tmp_path):
    asked = [str(cache), "--ask", "What is this?", "--ask", "Why?", "--out", str(tmp_path / "o"), *OPTIONS]
    assert generate.main([*asked, "--limit", "3"]) == 0
    first = read_answers(tmp_path / "o")
    assert len(first) == 3
    assert generate.main(asked) == 0
    answers = answers_by_id(tmp_path / "o")
    assert sorted((row["video_ids"], row["prompt"]) for row in answers.values()) == sorted(
        ([video], text) for video in VIDEOS for text in ("What is this?", "Why?")
    )
    assert [answers[row["question_id"]] for row in first.to_pylist()] == first.to_pylist()  # none asked again
    summary = answer_questions(cache, ask=["Why?"], out=tmp_path / "o", retention_ratio=0.10, max_new_tokens=6)
    assert (summary.n_ok, summary.n_new) == (2, 0)


def test_neither_batches_nor_workers_nor_formats_change_an_answer(first, cache, tmp_path):
    questions = write_questions(tmp_path / "q.csv", asked())
    options = ("--batch-size", "1", "--workers", "2", "--questions-per-shard", "3", "--format", "jsonl")
    ask(cache, questions, tmp_path / "o", options=options)
    alone, together = answers_by_id(tmp_path / "o"), answers_by_id(first[1])
    assert {row["batch_size"] for row in alone.values()} == {1, None}
    shards = list((tmp_path / "o" / "answers").iterdir())
    assert {path.suffix for path in shards} == {".jsonl"} and len(shards) > 4
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "o" / "runs").iterdir()]
    assert record["resources"]["plan"]["answer"]["workers"] == 2
    for key in ("answer", "choice", "error_class", "finish", "decoding", "topic", "n_prompt_tokens"):
        assert {n: row[key] for n, row in alone.items()} == {n: row[key] for n, row in together.items()}


def test_another_seed_draws_other_answers_and_the_greedy_stay(first, cache, tmp_path):
    # Two greedy questions, two that are drawn, one with choices; as a table has them, every column in each row.
    rows = [{"temperature": None, "choices": None, **asked()[i]} for i in (0, 1, 8, 9, 12)]
    questions = write_questions(tmp_path / "q.parquet", [{**row, "video_id": [row["video_id"]]} for row in rows])
    ask(cache, questions, tmp_path / "o", options=("--seed", "1", "--choices", "loglikelihood"))
    other, before = answers_by_id(tmp_path / "o"), answers_by_id(first[1])
    assert all(other[name]["answer"] == before[name]["answer"] for name in ("q00", "q01"))
    assert all(other[name]["answer"] != before[name]["answer"] for name in ("q08", "q09"))
    text = other["q12"]
    assert text["answer"] == ["a dog", "a bike", "a house"][text["choice"]]
    assert min(text["choice_tokens"]) >= 1 and text["choice_normalised"] is not None


def answer_until_killed(argv: list[str], log: str, address: str, owner: int) -> None:
    """Run jobs.generate on the Ray of process ``owner``; kill its worker after two commits, itself after twenty."""
    begin_forked(log, {"RAY_ADDRESS": address})
    commit, commits = run.commit_answers, count()

    def kill_and_commit(*args: Any) -> None:
        if (n_done := next(commits)) == 2:
            workers = [pid for pid, title in family(owner).items() if title.startswith(WORKER)]
            assert workers, "it has answered everything"
            for worker in workers:  # one of an earlier run may still end
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)  # Ray starts another one
        if n_done == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(*args)

    run.commit_answers = kill_and_commit  # type: ignore[attr-defined]
    generate.main(argv)


def test_a_killed_worker_and_a_killed_driver_lose_and_double_nothing(one_ray, cache, tmp_path):
    rows = [{"question_id": i, "video_id": VIDEOS[i % 2], "prompt": f"Question {i}?"} for i in range(160)]
    questions = write_questions(tmp_path / "q.jsonl", rows)
    batches = ("--questions-per-shard", "4", "--batch-size", "2")
    argv = [str(cache), "--questions", str(questions), "--out", str(tmp_path / "o"), *batches, "--max-new-tokens", "24"]
    driver = fork(answer_until_killed, argv, str(tmp_path / "log"), one_ray, os.getpid())
    driver.join(300)
    assert driver.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    half = answers_by_id(tmp_path / "o")
    assert 0 < len(half) < len(rows) and all(row["status"] == "ok" for row in half.values())
    larger = ("--questions-per-shard", "64", "--batch-size", "8")  # what is no setting of the answers may change
    assert generate.main([*argv, *larger]) == 0
    table = AnswersTable(LocalStore(tmp_path / "o")).rows()
    each = {tuple(row.values()) for row in table.select(["question_id", "run_id", "attempts"]).to_pylist()}
    assert Counter(question for question, *_ in each) == Counter(str(i) for i in range(160))  # also of merged files
    again = answers_by_id(tmp_path / "o")
    assert all(again[name] == row for name, row in half.items())
    assert len({row["run_id"] for row in again.values()}) == 2


def test_a_device_that_the_cluster_lacks_is_refused_before_any_row(cache, first, tmp_path):
    said = ask(cache, first[0], tmp_path / "o", options=("--device", "cuda"), code=2)
    assert "--device cuda: the Ray cluster has no GPU" in said
    assert [path.name for path in (tmp_path / "o").rglob("*")] == ["runs"]


def test_cache_questions_and_answers_on_s3(cache, tmp_path, monkeypatch):
    with S3Server("ask") as server:
        for path in cache.rglob("*"):
            if path.is_file():
                server.upload(f"cache/{path.relative_to(cache)}", path.read_bytes())
        questions = write_questions(tmp_path / "q.jsonl", asked()[-5:])
        server.upload("q.jsonl", questions.read_bytes())
        server.reach(monkeypatch)
        argv = [server.uri("cache"), "--questions", server.uri("q.jsonl"), "--out", server.uri("answers"), *OPTIONS]
        assert generate.main(argv) == 0
        rows = answers_by_id(server.uri("answers"))
        assert {name: row["error_class"] for name, row in rows.items()} == {"q12": None, "q13": None, **FAILURES}
        assert generate.main([*argv, "--system", "Hi"]) == 2
        (record,) = store_at(server.uri("answers")).names("runs", ".json")
        assert SECRET not in store_at(server.uri("answers")).read(record).decode()
