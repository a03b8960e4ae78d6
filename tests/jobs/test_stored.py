"""Caches, answers and results that earlier versions wrote: every command reads them, resumes on them and joins them.

``tests/pipeline/stored`` has them as each version left them, by its commit, but with today's weights of the tiny model,
since rows of other weights are refused. ``cache`` holds s3://stored/videos at 10 %, ``compacted`` is the same cache
behind jobs.compact. ``answers`` and ``lines`` are the answers to q.jsonl as Parquet and as JSON lines, ``scored`` the
scores of ``answers``, and ``results`` an evaluation of q.jsonl without its tokens.
"""

import json
import shutil
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import compact, evaluate, generate, inspect, merge, prune, verify
from pipeline import TokenCache, read_answers
from pipeline.cache.header import serialize_header
from pipeline.cache.schema import LATER, VIDEO_SCHEMA, write_parquet
from pipeline.cache.table import list_table_files, make_small_name, read_file
from pipeline.errors import CorruptShard, NotACache, NotAnswers, NotResults
from pipeline.evaluate.request import read_results_header
from pipeline.evaluate.results import read_scores
from pipeline.evaluate.scores import SCORES
from pipeline.generate.answers import ANSWER_SCHEMA, LATER_COLUMNS, AnswersTable, merge_answers
from pipeline.prune.encode_again import read_run_config
from pipeline.runner.run_record import find_newest_record
from pipeline.storage.stores import LocalStore
from pipeline.video.sampling import DECODING_RULES
from tests.builders.runs import said_by
from tests.builders.stores import S3Server
from tests.paths import ROOT

STORED = ROOT / "tests/pipeline/stored"
VERSIONS = ("ed03be40", "214fe680")
VIDEOS = "s3://stored/videos/"
SAMPLING = ("--num-frames", "2", "--retention-ratio", "0.1")
REPLIES = ["B", " lar\ufffd\x03\ufffd", "B", None]  # to the questions 1 to 4


def unpack(folder: Path, version: str) -> Path:
    """Unpack what a version wrote; return its folder, with the questions and videos beside it."""
    with tarfile.open(STORED / f"{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    shutil.copy(STORED / "q.jsonl", folder)
    shutil.copytree(STORED / "videos", folder / "videos", dirs_exist_ok=True)
    return folder / version


@pytest.fixture(params=VERSIONS)
def stored(request, tmp_path, monkeypatch) -> Path:
    """What a version wrote, which is the working folder."""
    monkeypatch.chdir(unpack(tmp_path, request.param))
    return tmp_path / request.param


@pytest.fixture
def sources(monkeypatch):
    """A server with the videos at the place that the stored caches name."""
    with S3Server() as server:
        server.reach(monkeypatch)
        server.client.create_bucket(Bucket="stored")
        for path in (STORED / "videos").iterdir():
            server.client.put_object(Bucket="stored", Key=f"videos/{path.name}", Body=path.read_bytes())
        yield server


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(("stored", "name"), [(VERSIONS[0], "cache"), (VERSIONS[1], "compacted")], indirect=["stored"])
def test_a_cache_is_read_verified_inspected_and_resumed(stored, name, sources):
    cache = TokenCache(stored / name)
    assert cache.video_ids == ["a.mp4", "b.mp4"] and len(cache.get("a.mp4").tokens) == 39
    assert "nothing is wrong" in said_by(verify, name)
    assert "text.mp4" in said_by(inspect, name) and "temporal density" in said_by(inspect, name, "a.mp4")
    said = said_by(prune, VIDEOS, "--out", name, *SAMPLING)
    assert "nothing to do: every video has a row already" in said
    record = find_newest_record(cache.store)
    assert record is not None and read_run_config(cache, record, None).num_frames == 2


def test_caches_of_two_versions_are_merged(tmp_path, monkeypatch):
    for version in VERSIONS:
        unpack(tmp_path, version)
    monkeypatch.chdir(tmp_path)
    said_by(merge, *(f"{version}/cache" for version in VERSIONS), "--out", "merged", "--on-equal", "rule")
    said_by(compact, "merged", "--keep-minutes", "0")
    assert TokenCache("merged").video_ids == ["a.mp4", "b.mp4"] and "nothing is wrong" in said_by(verify, "merged")


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
def test_new_videos_and_new_questions_join_the_stored_rows(stored, sources):
    sources.client.put_object(Bucket="stored", Key="videos/c.mp4", Body=(STORED / "videos/b.mp4").read_bytes())
    said = said_by(prune, VIDEOS, "--out", "compacted", *SAMPLING)
    assert "1 videos in" in said and "another version of this program decoded the rows" in said
    assert find_newest_record(LocalStore(stored / "compacted"))["decoding_rules"] == DECODING_RULES
    said_by(compact, "compacted", "--keep-minutes", "0")
    assert TokenCache("compacted").video_ids == ["a.mp4", "b.mp4", "c.mp4"]
    assert "nothing is wrong" in said_by(verify, "compacted")
    more = {"question_id": "5", "video_id": "b.mp4", "prompt": "Why?", "topic": "reasons", "when": 3}
    Path("q.jsonl").write_text((STORED / "q.jsonl").read_text() + json.dumps(more))
    for name in ("answers", "lines"):
        before = read_answers(name)
        argv = ("cache", "--questions", "q.jsonl", "--out", name, "--max-new-tokens", "4")
        assert "4 of 5 questions have" in said_by(generate, *argv)
        after = read_answers(name)
        assert after.slice(0, 4).select(before.column_names).equals(before)
        assert after["topic"].to_pylist() == ["animals", "events", None, None, "reasons"]
        assert after["when"].to_pylist() == [None] * 4 + [3]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(("stored", "name"), [(VERSIONS[0], "lines"), (VERSIONS[1], "answers")], indirect=["stored"])
def test_answers_are_read_inspected_resumed_scored_and_merged(stored, name):
    table = read_answers(name)
    assert table.column_names == [*ANSWER_SCHEMA.names, "topic"]
    assert table["answer"].to_pylist() == REPLIES and table["status"].to_pylist() == ["ok"] * 3 + ["failed"]
    is_old = stored.name == VERSIONS[0]
    assert table["decode_warnings"].to_pylist() == ([None] * 4 if is_old else [0, 0, 0, None])
    assert table["topic"].to_pylist() == ["animals", "events", None, None]
    assert "3 answered, 1 failed" in said_by(inspect, name) and "animals" in said_by(inspect, name, "1")
    said = said_by(generate, "cache", "--questions", "../q.jsonl", "--out", name, "--max-new-tokens", "4")
    assert "4 of 4 questions have their answers already" in said
    said_by(evaluate, "--score", name, "--out", "again", "--draws", "100")
    merge_answers(LocalStore(stored / name), 0)
    assert read_answers(name).equals(table)


@pytest.mark.usefixtures("idle")
def test_results_are_resumed_scored_again_and_laid_out(stored):
    before = pq.read_table("results/scores.parquet")
    grid = ("--method", "gstep", "--retention-ratio", "0.1", "--num-frames", "2", "--draws", "100")
    said = said_by(evaluate, "--benchmark", "../q.jsonl", "--data", "../videos", *grid, "--out", "results")
    assert "6 answered, 2 failed, 0 without a row" in said
    assert pq.read_table("results/scores.parquet").select(before.column_names).equals(before)
    said_by(evaluate, "--score", "answers", "--out", "scored", "--draws", "100")
    said_by(evaluate, "--results", "results", "--out", "laid", "--draws", "100")
    assert "3 answered" not in said_by(inspect, "results/answers")


def test_of_scores_that_do_not_say_it_the_cut_replies_are_unknown(tmp_path, monkeypatch):
    """Not 0: the page would say that no reply was cut."""
    for version, known in zip(VERSIONS, (False, True), strict=True):
        monkeypatch.chdir(unpack(tmp_path, version))
        said = said_by(evaluate, "--results", "results", "--out", "laid")
        assert ("does not say which replies were cut" in said) != known
        assert (json.loads(Path("laid/tables.json").read_text())[0]["rows"][0]["n_cut"] is not None) == known


def without_column(store: LocalStore, kind: str, column: str) -> None:
    """Write a stored file of a kind again without a column, which it may lack, under a name that fits its content."""
    if kind == "scores":
        table = pq.read_table(store.root / SCORES)
        store.put(SCORES, write_parquet(table.drop_columns([column])))
        return
    folder = "videos" if kind == "cache" else "answers"
    (old, *_) = store.names(folder, ".parquet")
    table = pq.read_table(store.root / old)
    data = write_parquet(table.select([name for name in table.column_names if name != column]))
    store.delete(old)
    store.put(make_small_name(folder, "run", 0, data), data)


@pytest.mark.parametrize(
    ("kind", "later", "needed"),
    [
        ("cache", list(LATER), ["status", "checksum"]),
        ("answers", list(LATER_COLUMNS), ["status", "finish"]),
        ("scores", ["finish", "weak", "decode_warnings"], ["status", "cluster"]),
    ],
)
def test_a_later_column_is_null_and_any_other_that_is_missing_is_damage(tmp_path, kind, later, needed):
    def read() -> pa.Table:
        if kind == "cache":
            return pa.concat_tables(read_file(store, file, VIDEO_SCHEMA.names) for file in list_table_files(store))
        return AnswersTable(store).rows() if kind == "answers" else read_scores("r", store, published=True)

    place, error = {"scores": ("results", NotResults)}.get(kind, (kind, CorruptShard))
    whole = unpack(tmp_path / "whole", VERSIONS[1]) / place
    for column in (*later, *needed):
        store = LocalStore(shutil.copytree(whole, tmp_path / column))
        rows = len(read())
        without_column(store, kind, column)
        refused = nullcontext() if column in later else pytest.raises(error, match=f"it has no column {column}")
        with refused:
            assert len(read()) == rows


READ = {
    "cache/cache.json": (NotACache, lambda store: TokenCache(store.root)),
    "answers/answers.json": (NotAnswers, lambda store: read_answers(store.root)),
    "results/evaluation.json": (NotResults, read_results_header),
}


@pytest.mark.parametrize("header", READ)
def test_another_schema_version_is_refused_with_the_version_that_wrote_it(tmp_path, header):
    store, (error, read) = LocalStore((unpack(tmp_path, VERSIONS[1]) / header).parent), READ[header]
    name = Path(header).name
    content = json.loads(store.read(name))
    for version, who in ((99, "A newer"), ("99+int2", "A newer"), (0, "An older"), (None, "")):
        store.put(name, serialize_header({**content, "schema_version": version}))
        with pytest.raises(error, match=f"schema version {version!r}.*{who}".replace("+", r"\+")):
            read(store)
