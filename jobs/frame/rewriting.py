"""The work that the commands share which make one cache of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.frame.json_document import Done
from jobs.frame.stores import objects_of, saying
from pipeline.errors import RunFailed
from pipeline.options import CodeOptions, S3Options

if TYPE_CHECKING:
    from pipeline.cache.reader import TokenCache
    from pipeline.rewrite.rewrite import Rewrite


@dataclass(frozen=True, kw_only=True)
class RewriteOptions(S3Options, CodeOptions):
    """The options that these commands share."""


def rewrite_cache(
    name: str, place: str, out: str, config: RewriteOptions, console: Console, plan: Callable[[TokenCache], Rewrite]
) -> Done:
    """Make the cache ``out`` of the cache at ``place``, or continue it; print what was done and return the record.

    ``name`` is the command's word for the cache at ``place``; ``plan`` plans the rewrite of that cache.

    Raises RunFailed where a store fails, and as ``plan`` and ``rewrite``.
    """
    from pipeline.cache.changed_code import REDO  # noqa: PLC0415
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415 - torch and Arrow load after the flags are checked
    from pipeline.rewrite.rewrite import rewrite  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    objects, say = objects_of(config), saying(console)
    made = store_at(out, objects)
    try:
        done = rewrite(
            plan(TokenCache(place, store=store_at(place, objects))), made, say, redo=config.on_changed == REDO
        )
    except OSError as error:
        raise RunFailed(str(error)) from error
    for line in done.lines():
        say(line)
    return Done(1 if done.failed else 0, {name: place, "out": out, **asdict(done)})
