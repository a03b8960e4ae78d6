"""The skeleton of every run: its steps in their order, under one lock, with a record that is saved."""

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.errors import CacheLocked, IdentityMismatch, RunFailed, UsageError
from pipeline.execution.claim import Claim, holder
from pipeline.execution.outcome import Outcome
from pipeline.execution.run import Run, Streamed
from pipeline.execution.run_record import RunFile
from pipeline.options import RunOptions
from pipeline.storage.stores import LocalStore


@dataclass(frozen=True)
class Words:
    """A request to write words, each as a file."""

    store: LocalStore
    words: tuple[str, ...]
    run_id: str = "r1"


class WordRun(Run[RunOptions, Words, list[str], Outcome]):
    """Writes the words that are not there yet; it notes each step and who has a claim meanwhile."""

    def __init__(self, root: Path, *words: str) -> None:
        super().__init__(RunOptions(device="cpu", s3_endpoint="http://secret.example"), Console(file=io.StringIO()))
        self.request = Words(LocalStore(root), words)
        self.steps: list[tuple[str, str | None]] = []

    def _step(self, name: str) -> None:
        found = holder(self.request.store) if self.request.store.root.is_dir() else None
        self.steps.append((name, found["run_id"] if found else None))

    def prepare(self) -> Words:
        self._step("prepare")
        return self.request

    def match(self, request: Words) -> Words:
        self._step("match")
        return replace(request, words=tuple(word.lower() for word in request.words))

    def remaining(self, request: Words) -> list[str]:
        self._step("remaining")
        return [word for word in request.words if not request.store.exists(f"words/{word}")]

    def stream(self, request: Words, todo: list[str]) -> Streamed:
        self._step("stream")
        run_file = RunFile(request.store, {"run_id": request.run_id})
        with run_file:
            for word in todo:
                request.store.put(f"words/{word}", word.encode())
        return Streamed(run_file, n_failed=0)

    def summarise(self, request: Words, todo: list[str], n_failed: int, wall_s: float) -> Outcome:
        self._step("summarise")
        n_ok = len(request.store.names("words", ""))
        return Outcome(
            n_ok=n_ok,
            failures={},
            examples={},
            n_missing=len(request.words) - n_ok,
            n_new=len(todo),
            n_new_failed=n_failed,
            wall_s=wall_s,
        )


def record_of(root: Path) -> dict[str, object]:
    return json.loads((root / "runs" / "r1.json").read_text())


def test_the_steps_come_in_order_and_all_but_the_first_under_the_lock(tmp_path):
    run = WordRun(tmp_path / "out", "A", "b")
    outcome = run.carry_out()
    assert run.steps == [
        ("prepare", None),
        *((name, "r1") for name in ("match", "remaining", "stream", "summarise")),
    ]
    assert (outcome.n_ok, outcome.n_new, outcome.n_missing) == (2, 2, 0) and outcome.wall_s >= 0
    assert LocalStore(tmp_path / "out").names("words", "") == ["words/a", "words/b"]  # what match gave
    assert holder(run.request.store) is None


def test_the_record_has_the_summary_once_it_is_known(tmp_path):
    WordRun(tmp_path, "a").carry_out()
    record = record_of(tmp_path)
    assert (record["status"], record["error"]) == ("finished", None)
    assert record["summary"]["n_ok"] == 1 and record["summary"]["n_failed"] == 0


def test_where_nothing_is_left_nothing_is_streamed_or_recorded(tmp_path):
    WordRun(tmp_path, "a").carry_out()
    (tmp_path / "runs" / "r1.json").unlink()
    again = WordRun(tmp_path, "a")
    outcome = again.carry_out()
    assert [name for name, _ in again.steps] == ["prepare", "match", "remaining", "summarise"]
    assert (outcome.n_ok, outcome.n_new) == (1, 0) and not (tmp_path / "runs" / "r1.json").exists()


def test_the_configuration_is_shown_without_its_secrets_and_defaults_of_nothing(tmp_path):
    run = WordRun(tmp_path, "a")
    run.carry_out()
    shown = run.console.file.getvalue()
    assert shown.startswith("configuration: ") and "device=cpu" in shown and "s3_endpoint=(set)" in shown
    assert "secret.example" not in shown and "revision=" not in shown and "max_attempts=" not in shown


@pytest.mark.parametrize("step", ["prepare", "match", "remaining", "stream", "summarise"])
def test_a_store_that_fails_ends_the_run_and_frees_the_lock(tmp_path, step):
    class Failing(WordRun):
        def _step(self, name: str) -> None:
            super()._step(name)
            if name == step:
                raise OSError(28, "No space left on device")

    run = Failing(tmp_path, "a")
    with pytest.raises(RunFailed, match=r"OSError: .*No space left") as caught:
        run.carry_out()
    assert isinstance(caught.value.__cause__, OSError)
    assert run.steps[-1][0] == step and holder(run.request.store) is None


def test_what_was_committed_before_a_failure_stays_and_the_record_says_why(tmp_path):
    class Full(LocalStore):
        def put(self, name, data):
            if name == "words/b":
                raise OSError(28, "No space left on device", name)
            super().put(name, data)

    run = WordRun(tmp_path, "a", "b")
    run.request = replace(run.request, store=Full(tmp_path))
    with pytest.raises(RunFailed):
        run.carry_out()
    record = record_of(tmp_path)
    assert record["status"] == "failed" and "No space left" in record["error"] and "summary" not in record
    again = WordRun(tmp_path, "a", "b")
    assert again.carry_out().n_new == 1  # the rerun goes on


@pytest.mark.parametrize("refusal", [UsageError("no"), IdentityMismatch("other settings")])
def test_a_refusal_stays_one(tmp_path, refusal):
    class Refusing(WordRun):
        def match(self, request: Words) -> Words:
            raise refusal

    with pytest.raises(type(refusal), match=str(refusal)):
        Refusing(tmp_path, "a").carry_out()
    assert not (tmp_path / "words").exists()


def test_a_place_that_another_run_holds_is_not_touched(tmp_path):
    run = WordRun(tmp_path, "a")
    with Claim(LocalStore(tmp_path), "other", print), pytest.raises(CacheLocked, match="other"):
        run.carry_out()
    assert [name for name, _ in run.steps] == ["prepare"] and not (tmp_path / "words").exists()
