"""The work that jobs.recode and jobs.reprune share: rewriting a cache into another cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.frame.json_document import CommandResult
from jobs.frame.stores import make_objects, make_say
from pipeline.errors import RunFailed
from pipeline.options import CodeOptions, S3Options

if TYPE_CHECKING:
    from pipeline.cache.reader import TokenCache
    from pipeline.rewrite.rewrite import Rewrite


@dataclass(frozen=True, kw_only=True)
class RewriteOptions(S3Options, CodeOptions):
    """The options that jobs.recode and jobs.reprune share."""


def rewrite_cache(
    role: str, place: str, out: str, config: RewriteOptions, console: Console, plan: Callable[[TokenCache], Rewrite]
) -> CommandResult:
    """Rewrite the cache at ``place`` into the cache ``out``, new or resumed; print the result and return its record.

    The exit code is 1 if some videos failed.

    Args:
        role: the key of ``place`` in the record.
        plan: plans the rewrite of the opened cache.

    Raises RunFailed if a store fails, and as ``plan`` and ``rewrite``.
    """
    from pipeline.cache.changed_code import REDO  # noqa: PLC0415
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415 - torch and Arrow load after the flags are checked
    from pipeline.rewrite.rewrite import rewrite  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    objects, say = make_objects(config), make_say(console)
    target = store_at(out, objects)
    try:
        result = rewrite(
            plan(TokenCache(place, store=store_at(place, objects))), target, say, redo=config.on_changed == REDO
        )
    except OSError as error:
        raise RunFailed(str(error)) from error
    for line in result.lines():
        say(line)
    return CommandResult(1 if result.failed else 0, {role: place, "out": out, **asdict(result)})
