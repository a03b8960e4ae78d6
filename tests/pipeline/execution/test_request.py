"""What checking a request has in common: refusals, names of runs, and a place that lasts."""

import json
import re

import pytest

from gstep.errors import ModelError
from pipeline.errors import UsageError
from pipeline.execution.request import check_out, new_run_id, refusing, store_refusing
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, ObjectStore


@pytest.mark.parametrize("error", [ValueError("alpha must be in [0, 1]"), ModelError("alpha must be in [0, 1]")])
def test_what_gstep_refuses_refuses_the_request(error):
    with pytest.raises(UsageError, match="alpha must be in") as caught, refusing():
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(ZeroDivisionError), refusing():
        1 // 0  # noqa: B018 - a bug stays one


def test_a_store_that_fails_refuses_the_request_by_its_name(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.json: No such file"), store_refusing():
        LocalStore(tmp_path).read("gone.json")
    with pytest.raises(UsageError, match="the store: somehow"), store_refusing():
        raise OSError("somehow")


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
