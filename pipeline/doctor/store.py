"""The place where a cache is to be: what a run relies on there, tried with a file that is removed again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.doctor.finding import Finding
from pipeline.storage.stores import LocalStore, Store

_BYTES = 8 * 2**20
_SLOW_S = 2.0  # seconds for the test file above which a store is slow
_MAX_SKEW_S = 5.0


def reachable(store: Store) -> Store:
    """Return the store, or the nearest folder above it that exists, where a run would make it."""
    if store.folder is not None and not store.folder.exists():
        return LocalStore(next(path for path in store.folder.parents if path.exists()))
    return store


def check_store(store: Store) -> Iterator[Finding]:
    """Put, list, read and delete a test file of 8 MiB; yield one finding.

    An error of the store is a "wrong" finding.
    """
    name, data = f".doctor-{secrets.token_hex(6)}", secrets.token_bytes(_BYTES)
    wrong = []
    try:
        put_at = time.perf_counter()
        store.put(name, data)
        put_s = time.perf_counter() - put_at
        try:
            if name not in {Path(file.name).name for file in store.list_files("")}:
                wrong.append("a file that was put is not in the listing")
            middle = store.read_slice(name, 1000, 3000).data
            start = time.perf_counter()
            whole = store.read(name)
            read_s = time.perf_counter() - start
            if middle != data[1000:3000] or whole != data:
                wrong.append("what is read is not what was put")
            age_s = store.age(name).total_seconds()
            if not -_MAX_SKEW_S <= age_s <= _MAX_SKEW_S + time.perf_counter() - put_at:
                wrong.append(f"its clock is wrong: a file just put is {age_s:.0f} s old")
        finally:
            store.delete(name)
        if store.exists(name):
            wrong.append("a file that was deleted is still there")
    except OSError as error:
        says = f"{error.filename or store}: {error.strerror or error}"
        yield Finding("store", "wrong", says, "check that the place exists, the credentials, and --s3-endpoint")
        return
    if wrong:
        yield Finding("store", "wrong", f"{store}: {'; '.join(wrong)}", "use another store: a cache would lose rows")
        return
    tried = f"put in {put_s:.2f} s, listed, read in {read_s:.2f} s, read in part and deleted"
    says = f"{store}: a test file of {_BYTES >> 20} MiB was {tried}"
    yield Finding.slow_if(max(put_s, read_s) > _SLOW_S, "store", says, "use a store nearer to the workers")
