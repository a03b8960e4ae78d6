"""Checks that all kinds of requests share. Nothing is started here."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.storage.stores import Store


@contextmanager
def refusing() -> Iterator[None]:
    """Convert errors of gstep about an unusable model or method (ModelError, ValueError) to UsageError."""
    try:
        yield
    except UsageError:  # it is a ValueError too, and its class says more
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def store_refusing() -> Iterator[None]:
    """Convert errors of the store to UsageError, since nothing was started yet."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or 'the store'}: {error.strerror or error}") from error


def new_run_id() -> str:
    """Make a run id that begins with the time in milliseconds, so that names of runs and shards sort by time."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z-{secrets.token_hex(3)}"


def check_out(store: Store) -> None:
    """Raise UsageError if ``--out`` is a folder that Ray deletes after the job."""
    if store.folder is not None and not Path(str(store)).is_absolute() and _in_an_upload():
        raise UsageError(
            f"--out {store}: in this Ray job a relative path lies in the cluster's copy of --working-dir, lost "
            "with it: name an absolute path that every node sees"
        )


def _in_an_upload() -> bool:
    """Return whether this process runs in a folder uploaded by ``ray job submit --working-dir``."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return bool(job.get("runtime_env", {}).get("working_dir"))
