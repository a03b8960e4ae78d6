"""The command that a cache was made with, from its records."""

import json

import pytest

from pipeline.prune.config import PruneConfig
from pipeline.storage.stores import LocalStore
from pipeline.verify.command_again import command_again


@pytest.fixture
def store(tmp_path) -> LocalStore:
    (tmp_path / "my cache").mkdir()
    return LocalStore(tmp_path / "my cache")


def ran(store: LocalStore, name: str, **options: object) -> None:
    record = {"run_id": name, "config": PruneConfig(**options).as_record()}
    store.put(f"runs/{name}.json", json.dumps(record).encode())


def test_it_has_the_options_of_the_newest_run_that_are_not_the_default(store):
    ran(store, "1", videos="old")
    ran(
        store, "2", videos="a b/*.mp4", out="elsewhere", fps=1.0, max_frames=8, video_root=["x", "y"], limit=3,
        s3_endpoint="http://secret", retry_failed=True, shard="1/4", join=True, max_hours=2.0,
    )  # fmt: skip
    command = command_again(store, 1)
    assert command.startswith("python -m jobs.prune 'a b/*.mp4' ")
    assert command.endswith(f" --out '{store}' --retry-failed")
    assert "--video-root x --video-root y" in command and "--fps 1.0" in command and "--max-frames 8" in command
    for left_out in ("secret", "(set)", "limit", "old", "shard", "join", "max-hours"):
        assert left_out not in command


def test_it_asks_for_more_attempts_where_they_are_spent(store):
    ran(store, "1")
    assert "--max-attempts" not in command_again(store, 2)
    assert command_again(store, 3).endswith("--retry-failed --max-attempts 4")
    ran(store, "2", max_attempts=5)
    assert command_again(store, 4).endswith("--max-attempts 5")


def test_without_a_record_it_says_what_to_add(store):
    store.put("runs/1.json", b"{")
    assert command_again(store, 1) == "the command that made it, with --retry-failed"
