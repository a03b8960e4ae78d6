"""jobs.remove on answers and results: no byte of the removed texts is left, and nothing about the videos is asked."""

import io
import json
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jobs import evaluate, generate, inspect, remove
from pipeline import TokenCache, read_answers
from pipeline.cache.header import HEADER
from pipeline.errors import CorruptShard
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.request import EvaluateRequest, prepare
from pipeline.evaluate.run import answer_and_score, drop_tokens
from pipeline.generate.answers import check_answers_folder, commit_answers, merge_answers
from pipeline.generate.removal import read_removal_reasons
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.stores import LocalStore
from tests.builders.answers import answers_by_id, tiny_cache, write_questions
from tests.builders.runs import said_by
from tests.builders.stores import S3Server
from tests.jobs.test_stored import VERSIONS, unpack
from tests.paths import read_all
from tests.pipeline.evaluate.egoschema import UIDS, write_authors
from tests.pipeline.evaluate.layouts import commit_replies

QUIET = Console(quiet=True)
TEXTS = ("Which animal", "a cat", "a dog", "animals", "alike", "a.mp4 is")  # of the questions about a.mp4
GRID = ("--method", "gstep", "--retention-ratio", "0.1", "--num-frames", "2", "--draws", "100")
KEPT_COLUMNS = {"question_id", "run_id", "video_ids", "pruning", "method_code", "status", "error_message", "attempts"}


@pytest.fixture(params=VERSIONS[1:])
def stored(request, idle, tmp_path, monkeypatch) -> Path:
    """What a version wrote, which is the working folder; no model is loaded, and no Ray started."""
    monkeypatch.chdir(unpack(tmp_path, request.param))
    return tmp_path / request.param


def remove_from(place: str, ids: str = "a.mp4", code: int = 0) -> str:
    """Remove videos from a place; return what the command said."""
    Path("ids.txt").write_text(ids)
    argv = ("--ids", "ids.txt", "--reason", "asked for", "--keep-minutes", "0")
    return said_by(remove, place, *argv, code=code)


def evaluation(benchmark: object, console: Console = QUIET, **options) -> EvaluateRequest:
    """Prepare an evaluation of gstep at 0.25."""
    given = {"out": "r", "draws": 100, "method": ["gstep"], "retention_ratio": [0.25], **options}
    return prepare(EvaluateConfig(benchmark=str(benchmark), **given), console)


def all_text(folder: Path) -> str:
    """Everything that the files below a folder say, compressed columns and metadata too."""
    texts = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            texts.append(path.read_bytes().decode("utf-8", "replace"))
        if path.suffix == ".parquet":
            texts.append(json.dumps(pq.read_table(path).to_pylist(), default=str, ensure_ascii=False))
    return "\n".join(texts)


@pytest.mark.parametrize(("stored", "name"), [(VERSIONS[0], "answers"), (VERSIONS[1], "lines")], indirect=["stored"])
def test_removed_answers_leave_no_text_and_are_never_asked_again(stored, name):
    before = read_answers(name)
    shard = next((stored / name / "answers").iterdir())
    shutil.copy(shard, shard.with_name(f"{shard.stem} (1){shard.suffix}"))
    merge_answers(LocalStore(stored / name), 0)  # a merged file beside its sources
    record = next((stored / name / "runs").glob("*.json"))
    record.write_text(record.read_text().replace("text.mp4 is not", "Which animal is it?, a.mp4 is not"))
    assert all(text in all_text(stored / name) for text in TEXTS)
    said = remove_from(name)
    assert "1 videos removed for good from the answers, with 2 questions about them" in said
    assert not [text for text in TEXTS if text in all_text(stored / name)]
    rows = read_answers(name).to_pylist()
    assert [row["status"] for row in rows] == ["removed", "ok", "removed", "failed"]
    for row in (rows[0], rows[2]):
        assert {column for column, value in row.items() if value is not None} <= {*KEPT_COLUMNS, "prompt"}
        assert (row["prompt"], row["error_message"]) == ("", "asked for")
    assert [rows[1], rows[3]] == [before.to_pylist()[1], before.to_pylist()[3]]
    assert "0 answers lost their texts" in remove_from(name)
    # Neither again nor under a new id, whatever the options; and the rest has what it had.
    more = {"question_id": "5", "video_id": ["b.mp4", "a.mp4"], "prompt": "Which animal is new?"}
    Path("q.jsonl").write_text((stored.parent / "q.jsonl").read_text() + json.dumps(more))
    argv = ["cache", "--questions", "q.jsonl", "--out", name, "--max-new-tokens", "4", "--retry-failed"]
    said = said_by(generate, *argv)
    assert "1 questions are about removed videos, e.g. 5" in said
    assert "1 answered, 1 failed, 0 without a row" in said and "3 questions about removed" in said
    assert read_answers(name)["status"].to_pylist() == ["removed", "ok", "removed", "failed", "removed"]
    Path("q.jsonl").unlink()
    assert "Which animal" not in all_text(stored / name)
    said = said_by(inspect, name)
    assert "1 answered, 1 failed, 3 removed" in said and "removed: asked for" in said
    assert "asked for" in said_by(inspect, name, "1")
    said_by(inspect, name, "--failed")


def test_results_are_scored_and_written_again_without_the_removed_questions(stored):
    before = pq.read_table("results/scores.parquet")
    (stored / "results/pages").mkdir(exist_ok=True)
    (stored / "results/pages/sample.html").write_text("Which animal is it?")
    (stored / "results/lmms.json").write_text('{"metric": "acc", "numbers": {"none@1": {"acc": 0.5}}}')
    said = remove_from("results")
    assert "4 scores removed, 2 questions are left: lmms.json, scores.parquet" in said
    assert "lmms.json has no numbers now" in said and "rerun the jobs.evaluate command" in said
    assert json.loads(Path("results/lmms.json").read_text()) == {"metric": "acc", "numbers": {}}
    text = all_text(stored / "results")
    assert not [part for part in TEXTS if part in text] and not list((stored / "results/pages").iterdir())
    scores = pq.read_table("results/scores.parquet")
    others = [name in ("2", "4") for name in before["question_id"].to_pylist()]
    assert scores.select(before.column_names).equals(before.filter(pa.array(others)))
    (table, *_) = json.loads(Path("results/tables.json").read_text())
    assert table["columns"][-1]["n_questions"] == 2 and table["title"] == "q, tiny"
    assert "a.mp4" not in Path("results/videos.jsonl").read_text()
    # The same as evaluation says; it scores them from the answers.
    tables = Path("results/tables.md").read_text()
    said = said_by(evaluate, "--benchmark", "../q.jsonl", "--data", "../videos", *GRID, "--out", "results")
    assert "2 of 4 questions are about videos that were removed from the results: they are left out" in said
    assert "2 answered, 2 failed, 0 without a row" in said
    assert Path("results/tables.md").read_text() == tables
    assert pq.read_table("results/scores.parquet").equals(scores)
    assert "0 scores removed" in remove_from("results")
    said = remove_from("results", ids="b.mp4\ntext.mp4")
    assert "0 questions are left" in said and "lmms.json" not in said
    written = {"scores.parquet", "tables.md", "report.html", "lmms.json"}
    assert not written & {path.name for path in (stored / "results").iterdir()}


@pytest.mark.parametrize("stored", VERSIONS[:1], indirect=True)
def test_scores_of_answers_are_written_again_and_answers_of_before_do_not_bring_them_back(stored):
    said = remove_from("scored")
    assert "2 scores removed, 2 questions are left" in said
    assert not [part for part in TEXTS if part in all_text(stored / "scored")]
    for _ in range(2):  # with the answers as they are, and without the removed ones
        said_by(evaluate, "--score", "answers", "--out", "scored", "--draws", "100")
        assert set(pq.read_table("scored/scores.parquet")["question_id"].to_pylist()) == {"2", "4"}
        remove_from("answers")
    said_by(evaluate, "--score", "answers", "--out", "again", "--draws", "100")
    assert set(pq.read_table("again/scores.parquet")["question_id"].to_pylist()) == {"2", "4"}


def test_methods_are_compared_on_the_questions_that_no_place_has_removed(stored):
    for name, ratio in (("x", "0.1"), ("y", "0.05")):
        header = json.loads(Path("answers/answers.json").read_text())
        header["identity"]["retention_ratio"] = float(ratio)
        LocalStore(name).make()
        Path(name, "answers.json").write_text(json.dumps({k: v for k, v in header.items() if k != "checksum"}))
        for path in (stored / "answers/answers").iterdir():
            LocalStore(name).put(f"answers/{path.name}", path.read_bytes())
    remove_from("y")
    said_by(evaluate, "--score", "x", "y", "--out", "both", "--draws", "100")
    assert set(pq.read_table("both/scores.parquet")["question_id"].to_pylist()) == {"2", "4"}


def test_a_removal_that_is_stopped_leaves_nothing_to_a_second_one(stored, monkeypatch):
    """The texts in records of runs are found by the rows, which go last."""
    record = next(Path("answers/runs").glob("*.json"))
    record.write_text(record.read_text().replace("text.mp4 is not", "Which animal is it?, a.mp4 is not"))
    for fault in ("put", "delete"):
        with monkeypatch.context() as patch:
            original = getattr(LocalStore, fault)

            def fail(store, name, *data, original=original):
                if name.startswith("answers/"):
                    raise OSError(5, "the store is away", name)
                return original(store, name, *data)

            patch.setattr(LocalStore, fault, fail)
            remove_from("answers", code=1)
    assert "Which animal" in all_text(Path("answers"))
    remove_from("answers")
    assert not [text for text in TEXTS if text in all_text(Path("answers"))]
    assert read_answers("answers")["status"].to_pylist() == ["removed", "ok", "removed", "failed"]


def test_results_on_s3_and_their_answers_are_removed_from_alike(stored, monkeypatch):
    with S3Server("removal") as server:
        server.reach(monkeypatch)
        for path in (path for path in (stored / "results").rglob("*") if path.is_file()):
            server.upload(path.relative_to(stored).as_posix(), path.read_bytes())
        remove_from(server.uri("results"))
        keys = [item["Key"] for item in server.client.list_objects_v2(Bucket=server.bucket)["Contents"]]
        (stored / "s3").mkdir()
        for key in keys:
            server.client.download_file(server.bucket, key, str(stored / "s3" / key.replace("/", "-")))
        assert not [text for text in TEXTS if text in all_text(stored / "s3")]
        statuses = read_answers(server.uri("results/answers"))["status"].to_pylist()
        assert sorted(statuses) == ["failed"] * 2 + ["ok"] * 2 + ["removed"] * 4
        assert {"results/tables.md", "results/scores.parquet"} < set(keys)


ROWS = [{"question_id": name, "video_id": name, "prompt": f"What is in {name}?", "topic": name} for name in "ab"]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_no_turn_of_a_removed_conversation_is_left(stored, form):
    talk = [("user", "Which turn is it?"), ("assistant", "The first of a text."), ("user", "And then?")]
    turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in talk]
    row = {"question_id": "talk", "video_ids": ["a.mp4"], "attempts": 1, "status": "ok", "answer": "x"}
    row |= {"prompt": "And then?", "conversation": json.dumps(turns)}
    commit_answers(LocalStore("answers"), "run", 0, [row], form)
    Path("answers/runs/run.json").write_text(json.dumps({"note": "text of one user: Which turn is it?"}))
    assert "Which turn" in all_text(Path("answers"))
    remove_from("answers")
    assert not [text for text in ("Which turn", "The first of") if text in all_text(Path("answers"))]
    assert json.loads(Path("answers/runs/run.json").read_text()) == {"note": "text of one user: (removed)"}
    live = answers_by_id("answers")
    assert (live["talk"]["status"], live["talk"]["conversation"]) == ("removed", None)


def test_a_fresh_run_on_a_cache_of_a_removed_video_says_so_and_stores_no_text(ask, tmp_path):
    cache = tiny_cache(tmp_path / "c", ("a",), failed=("b",))
    remove_videos(cache, ["a"], "asked for", lambda line: None, timedelta(0))
    code, said = ask(rows=ROWS, read=True)
    assert code == 1 and "0 answered, 1 failed, 0 without a row" in said
    assert "'a' was removed from the cache" in said and "asked for. They are not asked" in said
    assert "unknown-video" not in said and "What is in a?" not in all_text(tmp_path / "o")
    rows = read_answers(tmp_path / "o").to_pylist()
    assert [row["status"] for row in rows] == ["removed", "failed"]
    assert (rows[0]["prompt"], rows[0]["topic"], rows[1]["topic"]) == ("", None, "b")
    assert ask("--retry-failed", rows=ROWS[:1], read=True)[0] == 0  # nothing is left to answer, or to fail
    assert len(read_answers(tmp_path / "o")) == 2


def test_answers_of_before_a_removal_from_the_cache_stay_with_a_note(ask, tmp_path):
    cache = tiny_cache(tmp_path / "c", ("a", "b"))
    question = {"video_ids": ["a"], "prompt": "What is in a?", "attempts": 1}
    assert ask("--limit", "1", rows=[{**ROWS[0], "video_id": "gone"}], read=True)[0] == 1  # for the header
    decoding = read_answers(tmp_path / "o")["decoding"][0].as_py()
    rows = [{**question, "question_id": name, "decoding": decoding} for name in ("good", "bad")]
    sizes = {"n_visual_tokens": 3, "n_prompt_tokens": 5, "batch_size": 1}
    sizes |= dict.fromkeys(("load_s", "prefill_s", "decode_s"), 0.1)
    rows = [{**rows[0], **sizes, "status": "ok"}, {**rows[1], "status": "failed", "error_class": "unknown-video"}]
    store = LocalStore(tmp_path / "o")
    commit_answers(store, "run", 0, rows)
    remove_videos(cache, ["a"], "asked for", lambda line: None, timedelta(0))
    asked = [{**ROWS[0], "question_id": name} for name in ("good", "bad")]
    code, said = ask(rows=asked, read=True)
    assert code == 0 and "1 answered, 0 failed" in said and f"jobs.remove {store} --ids" in said
    live = {name: row["status"] for name, row in answers_by_id(tmp_path / "o").items()}
    assert live == {"good": "ok", "bad": "removed", "a": "failed"}


def test_a_submission_loses_the_removed_questions_and_keeps_the_servers_scores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = str(write_authors(tmp_path / "data"))
    request = evaluation("egoschema", data=data)
    commit_replies(request)
    argv = ("--benchmark", "egoschema", "--data", data, "--out", "r", "--method", "gstep", "--retention-ratio", "0.25")
    said_by(evaluate, *argv)
    form = Path("r/submissions/server.json")
    form.write_text('{"gstep@0.25": 40.0}')
    video = request.loaded.items[0].video_id
    assert f"2 scores removed, {len(request.loaded.items) - 1} questions are left" in remove_from("r", ids=video)
    assert UIDS[0] == request.loaded.items[0].question_id
    for name in ("none@1", "gstep@0.25"):
        assert UIDS[0] not in json.loads(Path(f"r/submissions/{name}.json").read_text())
    assert json.loads(form.read_text()) == {"gstep@0.25": 40.0}
    assert UIDS[0] not in pq.read_table("r/scores.parquet")["question_id"].to_pylist()


def test_an_evaluation_of_a_cache_leaves_out_the_questions_about_its_removed_videos(tmp_path):
    cache = tiny_cache(tmp_path / "c", ("a",), failed=("b",), ratio=1.0, method="none")
    remove_videos(cache, ["a"], "asked for", lambda line: None, timedelta(0))
    file = write_questions(tmp_path / "q.jsonl", [{**row, "answer": "x"} for row in ROWS])
    said = io.StringIO()
    request = evaluation(file, Console(file=said, width=300), out=str(tmp_path / "r"), cache=str(cache))
    assert "1 of 2 questions are about videos that" in said.getvalue()  # it failed, and counts as wrong
    done = answer_and_score(request, QUIET)
    assert set(done.scores["question_id"].to_pylist()) == {item.question_id for item in done.loaded.items} == {"b"}
    assert (done.answers.n_removed, done.answers.n_failed, done.answers.n_missing) == (2, 2, 0)
    assert answer_and_score(request, QUIET).answers.n_new == 0


def test_a_cache_below_results_is_removed_from_too_and_one_that_is_dropped_leaves_its_bars(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_cache(tmp_path / "c", ("a", "b", "c"), ratio=1.0, method="none")
    rows = [*ROWS, {**ROWS[0], "question_id": "c", "video_id": "c"}]
    file = write_questions(tmp_path / "q.jsonl", [{**row, "answer": "x"} for row in rows])

    commit_replies(evaluation(file, cache="c"))
    answer_and_score(evaluation(file, cache="c"), QUIET)
    (tmp_path / "c").rename(tmp_path / "r/cache")
    cache = LocalStore("r/cache")
    said = remove_from("r", ids="a")
    assert "1 videos removed for good, 2 others moved" in said
    assert TokenCache(cache.root).video_ids == [i.question_id for i in evaluation(file).loaded.items] == ["b", "c"]
    remove_videos(cache, ["b"], "asked again", lambda line: None, timedelta(0))
    drop_tokens(evaluation(file), QUIET)
    assert not cache.exists(HEADER)
    assert read_removal_reasons(LocalStore("r/answers")) == {"a": "asked for", "b": "asked again"}


def test_scores_that_cannot_be_read_end_a_removal_before_anything_is_deleted(stored, monkeypatch):
    original = LocalStore.read

    def read(store, name):
        if name == "scores.parquet":
            raise OSError(110, "Connection timed out", name)
        return original(store, name)

    before = read_all(Path("results"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read", read)
        assert "Connection timed out" in remove_from("results", code=1)
    assert read_all(Path("results")) == before
    assert "2 questions are left" in remove_from("results")
    before = pq.read_table("scored/scores.parquet").drop_columns(["status"])
    pq.write_table(before, "scored/scores.parquet")
    assert "it has no column status" in remove_from("scored", code=2)
    assert pq.read_table("scored/scores.parquet").equals(before)


def test_results_of_an_evaluation_that_stopped_before_its_answers_are_removed_from(stored):
    shutil.rmtree("results/answers")
    shutil.copytree("cache", "results/cache", dirs_exist_ok=True)
    assert "a.mp4" in TokenCache("results/cache").video_ids
    remove_from("results")
    assert "a.mp4" not in TokenCache("results/cache").video_ids
    answers = LocalStore("results/answers")
    assert read_removal_reasons(answers) == {"a.mp4": "asked for"}
    check_answers_folder(answers)  # a later evaluation may write its answers there
    answers.put("answers/run-000000-0.parquet", b"")  # answers that lost their header may hold texts
    assert "no answers" in remove_from("results", ids="b.mp4", code=2)
    assert "b.mp4" not in TokenCache("results/cache").video_ids  # the tokens go all the same


def test_unknown_ids_and_those_of_a_copy_in_removed_are_barred_and_a_damaged_file_there_is_refused(stored):
    said = remove_from("answers", ids="a.mp")
    assert "1 of the ids are unknown here" in said and "did you mean a.mp4?" in said
    (bar,) = Path("answers/removed").iterdir()
    copy = bar.with_name("copy.json")
    copy.write_text(bar.read_text().replace("a.mp", "b.mp4"))
    assert read_removal_reasons(LocalStore("answers")) == {"a.mp": "asked for", "b.mp4": "asked for"}
    for path, text in ((copy, "{}"), (copy, '{"videos": ["a.mp4"]}'), (bar, bar.read_text().replace("a.mp", "c.mp4"))):
        path.write_text(text)
        with pytest.raises(CorruptShard, match="does not have the hash"):
            read_removal_reasons(LocalStore("answers"))
        path.unlink()
    Path("nothing").mkdir()
    assert "cache.json" in remove_from("nothing", code=2)
