"""What checking a request has in common: refusals, names of runs, and a place that lasts."""

import json
import re

import pytest

from pipeline.errors import UsageError
from pipeline.runner.run_record import check_out, new_run_id
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, ObjectStore


def test_names_of_runs_differ_and_sort_by_their_time():
    names = [new_run_id() for _ in range(50)]
    assert len(set(names)) == 50
    assert all(re.fullmatch(r"\d{8}T\d{9}Z-[0-9a-f]{6}", name) for name in names)
    times = [name.partition("-")[0] for name in names]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("out", "job", "refused"),
    [
        ("cache", {"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}, True),
        ("cache", {"runtime_env": {}}, False),
        ("cache", {}, False),
        ("cache", None, False),
        ("/mnt/cache", {"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}, False),
    ],
)
def test_a_relative_place_in_an_uploaded_folder_would_be_lost(monkeypatch, out, job, refused):
    if job is None:
        monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    else:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    check_out(ObjectStore("s3://bucket/cache", Objects()))
    if refused:
        with pytest.raises(UsageError, match=r"--out cache: .*name an absolute path"):
            check_out(LocalStore(out))
    else:
        check_out(LocalStore(out))
