"""A run that answers, on the driver: what the index of the cache decides needs neither a model nor Ray."""

import io
import json
from pathlib import Path

import pytest
import ray
from rich.console import Console

from pipeline.generate.answers import read_answers
from pipeline.generate.config import GenerateConfig
from pipeline.generate.run import answer_questions, answer_setup
from tests.pipeline.asking import request_about, tiny_cache, write_questions

ROWS = [
    *({"question_id": f"gone{i}", "video_id": "gone", "prompt": "p"} for i in range(3)),
    {"question_id": "bad", "video_id": ["a", "bad"], "prompt": "p"},
]


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_cache(tmp_path / "c", failed=("bad",))
    write_questions(tmp_path / "q.jsonl", ROWS)
    return tmp_path


def answered(folder: Path, said: io.StringIO | None = None, **options):
    config = GenerateConfig(
        cache=str(folder / "c"), questions=str(folder / "q.jsonl"), out=str(folder / "o"), **options
    )
    return answer_questions(config, Console(file=said or io.StringIO(), width=300))


def test_questions_on_videos_that_are_not_there_become_rows_and_no_ray_starts(folder):
    summary = answered(folder, questions_per_shard=3)
    assert not ray.is_initialized()
    assert summary.failures == {"unknown-video": 3, "failed-video": 1}
    assert (summary.n_ok, summary.n_new, summary.n_new_failed, summary.n_missing) == (0, 4, 4, 0)
    rows = read_answers(folder / "o").to_pylist()
    assert [(row["question_id"], row["attempts"]) for row in rows] == [("bad", 1), *((f"gone{i}", 1) for i in range(3))]
    assert len(list((folder / "o" / "answers").iterdir())) == 2  # of three and of one
    (record,) = (json.loads(file.read_text()) for file in (folder / "o" / "runs").iterdir())
    assert (record["status"], record["questions"]) == ("finished", 4)
    assert record["summary"]["failures"] == summary.failures


def test_a_rerun_has_nothing_to_do_and_says_so(folder):
    answered(folder)
    said = io.StringIO()
    summary = answered(folder, said)
    assert (summary.n_new, summary.n_failed) == (0, 4)
    assert "4 of 4 questions have their answers already, 4 of them as errors" in said.getvalue()
    assert len(list((folder / "o" / "runs").iterdir())) == 1
    again = answered(folder, retry_failed=True)
    assert (again.n_new, again.n_new_failed) == (4, 4)
    assert {row["attempts"] for row in read_answers(folder / "o").to_pylist()} == {2}


def test_actors_get_what_was_asked_for(folder):
    job = request_about(folder / "c", ROWS, retention_ratio=0.10, positions="original", batch_size=3)
    setup = answer_setup(job, "cpu", "float32")
    assert (setup.retention_ratio, setup.positions, setup.batch_size) == (0.10, "original", 3)
    assert (setup.device, setup.dtype, setup.prunings[""], setup.order) == ("cpu", "float32", None, "index")
    assert setup.live.equals(job.live) and setup.store is job.cache
