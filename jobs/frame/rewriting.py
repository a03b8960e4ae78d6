"""The options and the work that jobs.recode and jobs.reprune share: rewriting a cache into another cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console

from jobs.frame.json_document import CommandResult
from jobs.frame.stores import make_objects, report_result
from pipeline.console import make_speaker
from pipeline.options import REQUIRED, CodeOptions, S3Options, check_choices, option

if TYPE_CHECKING:
    from pipeline.cache.reader import TokenCache
    from pipeline.rewrite.recode import Rewrite


@dataclass(frozen=True, kw_only=True)
class RewriteOptions(S3Options, CodeOptions):
    """The options that jobs.recode and jobs.reprune share. Raises UsageError for an invalid value.

    Attributes:
        role: the name of the option with the cache to read, which is also its key in the command's record.
    """

    role: ClassVar[str]

    out: str = option(REQUIRED, "the cache to create or to continue", metavar="CACHE", group="caches")

    def __post_init__(self) -> None:
        check_choices(self)


def rewrite_cache(config: RewriteOptions, console: Console, plan: Callable[[TokenCache], Rewrite]) -> CommandResult:
    """Rewrite a cache into the cache ``--out``, new or resumed, print the result, and return it.

    The exit code is 1 if some videos could not be rewritten. ``plan`` creates the rewrite for the opened source cache.

    Raises:
        UsageError: the source is not a cache, or the target holds something else or has another identity.
        CorruptShard: a file of the source is damaged.
    """
    from pipeline.cache.changed_code import REDO  # noqa: PLC0415
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415 - torch and Arrow load after the flags are checked
    from pipeline.rewrite.recode import update_rewritten_cache  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    place, objects, say = getattr(config, config.role), make_objects(config), make_speaker(console)
    target, redo = store_at(config.out, objects), config.on_changed == REDO
    result = update_rewritten_cache(plan(TokenCache(place, store=store_at(place, objects))), target, say, redo=redo)
    return report_result(result, say, exit_code=1 if result.failed else 0, **{config.role: place, "out": config.out})
