"""Fixtures of several tests of commands."""

import pytest
import ray

from jobs import generate
from tests.builders.answers import write_questions
from tests.builders.runs import forbid_models, forbid_ray, run_here

QUESTION = {"question_id": 1, "video_id": "a", "prompt": "What?"}


@pytest.fixture(scope="module")
def one_ray():
    """The Ray that the commands of a file share, which run in this process; its address."""
    from tests.builders.clusters import PLAIN, ray_here  # noqa: PLC0415 - seconds, where no test starts Ray

    with ray_here(*PLAIN):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture
def idle(monkeypatch):
    """Nothing can start Ray or load a weight of a model."""
    forbid_ray(monkeypatch)
    forbid_models(monkeypatch)


@pytest.fixture
def ask(tmp_path):
    """Run jobs.generate on the cache ``c`` with Ray and checkpoints forbidden; returns its exit code and what it said.

    Where checkpoints are ``read``, they are not forbidden.
    """

    def run(*options, rows=(QUESTION,), read=False) -> tuple[int, str]:
        questions = write_questions(tmp_path / "q.jsonl", list(rows))
        argv = [str(tmp_path / "c"), "--questions", str(questions), "--out", str(tmp_path / "o"), *options]
        with pytest.MonkeyPatch.context() as patch:
            forbid_ray(patch)
            if not read:
                forbid_models(patch)
            done = run_here(generate, argv)
        return done.returncode, " ".join(done.stdout.split())

    return run


@pytest.fixture
def refuse(ask, tmp_path):
    """A run of jobs.generate that must be refused, and leave nothing behind; returns why."""

    def check(*options, **more) -> str:
        code, text = ask(*options, **more)
        assert code == 2 and not (tmp_path / "o").exists(), text
        return text.partition("error: ")[2]

    return check
