"""The command that a cache was last made with, as its own records have it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields

from pipeline.execution.run_record import newest_record
from pipeline.prune.config import PruneConfig
from pipeline.rows import JsonObject
from pipeline.storage.stores import Store

# Damaged videos may be of any part of the corpus, whichever part the newest run did.
_NOT_AGAIN = {"out", "limit", "shard", "join", "max_hours", "dry_run", "retry_failed", "max_attempts"}


def command_again(store: Store, attempts: int) -> str:
    """Return the command line ``python -m jobs.prune ... --retry-failed`` with the newest run's options.

    It also takes videos that had so many ``attempts``; the newest run is the newest whose record can be read.
    """
    record, more = newest_record(store), ["--retry-failed"]
    config = {} if record is None else record["config"]
    most, usual = config.get("max_attempts"), PruneConfig().max_attempts
    if not isinstance(most, int):
        most = usual
    if attempts >= most:
        more += ["--max-attempts", str(attempts + 1)]
    elif most != usual:
        more += ["--max-attempts", str(most)]
    if record is None:
        return f"the command that made it, with {shlex.join(more)}"
    return shlex.join(["python", "-m", "jobs.prune", *_flags(config), "--out", str(store), *more])


def _flags(config: JsonObject) -> Iterator[str]:
    """Yield the flags of options that differ from the defaults; secret options are not in the record."""
    for item in fields(PruneConfig):
        value = config.get(item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if item.name in _NOT_AGAIN or item.metadata.get("secret") or value is None or value == default:
            continue
        flag = "--" + item.name.replace("_", "-")
        if item.metadata.get("positional"):
            yield from map(str, value if isinstance(value, list) else [value])  # older records have a single text
        elif isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        else:
            for one in value if isinstance(value, list) else [value]:
                yield from (flag, str(one))
