"""The record of a run: its name, a place that lasts, written at the start and at the end, however the run ends."""

import json

import pytest

from pipeline.runner.run_record import RunFile
from pipeline.storage.stores import LocalStore


def read(store: LocalStore) -> dict[str, object]:
    return json.loads(store.read("runs/r1.json"))


class Away(LocalStore):
    """A store that takes nothing once ``away`` is set."""

    away = False

    def put(self, name, data):
        if self.away:
            raise OSError(5, "Input/output error")
        super().put(name, data)


def test_a_run_is_running_and_then_finished(tmp_path):
    store = LocalStore(tmp_path)
    run_file = RunFile(store, {"run_id": "r1", "host": "h"})
    assert not store.exists("runs/r1.json")
    with run_file:
        running = read(store)
        assert (running["status"], running["host"]) == ("running", "h") and "ended" not in running
        run_file.save(device="cpu")
        assert read(store)["device"] == "cpu"
    ended = read(store)
    assert (ended["status"], ended["error"], ended["device"]) == ("finished", None, "cpu")
    assert running["started"] == ended["started"] <= ended["ended"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(RuntimeError("torn\x1b[31m"), "failed", "torn"), (KeyboardInterrupt(), "cancelled", "")],
)
def test_what_ended_it_is_recorded_and_raised(tmp_path, error, status, said):
    store = LocalStore(tmp_path)
    with pytest.raises(type(error)), RunFile(store, {"run_id": "r1"}):
        raise error
    record = read(store)
    assert record["status"] == status and record["error"].startswith(said) and "\x1b" not in record["error"]


def test_a_store_that_is_away_hides_nothing_and_is_not_hidden(tmp_path):
    store = Away(tmp_path)
    with pytest.raises(RuntimeError, match="the run's own"), RunFile(store, {"run_id": "r1"}):
        store.away = True
        raise RuntimeError("the run's own")
    store.away = False
    with pytest.raises(OSError, match="Input/output"), RunFile(store, {"run_id": "r1"}):
        store.away = True
