"""What the commands on caches share: their options, the client of object stores, and printing a result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jobs.frame.json_document import CommandResult
from pipeline.console import Say
from pipeline.options import REQUIRED, S3Options, check, option

if TYPE_CHECKING:
    from pipeline.storage.s3 import Objects

_MAX_KEEP_MINUTES = 10**8
VIDEO_ROOT_HELP = (
    "{} sources in this folder or s3://bucket/prefix ('sample': the sample clips); may be repeated. What a cache names "
    "elsewhere is not read"
)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(S3Options):
    """The options of commands that maintain a cache. Raises UsageError for an invalid value."""

    cache: str = option(
        REQUIRED,
        "the folder, or the s3://, gs:// or az:// prefix, that jobs.prune wrote",
        positional=True,
        metavar="CACHE",
        group="cache",
    )
    keep_minutes: float = option(10.0, "keep replaced files for M minutes for their readers", metavar="M")

    def __post_init__(self) -> None:
        """Raise UsageError unless ``keep_minutes`` is a number from 0 to 10^8."""
        is_valid = 0 <= self.keep_minutes <= _MAX_KEEP_MINUTES
        check(is_valid, "keep_minutes", f"from 0 to {_MAX_KEEP_MINUTES:,}", self.keep_minutes)

    @property
    def keep(self) -> timedelta:
        """The time for which replaced files stay for their readers."""
        return timedelta(minutes=self.keep_minutes)


class CacheCommandResult(Protocol):
    """The result of a command that writes to a cache or to answers: a dataclass with lines for the user."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""


def make_objects(config: S3Options) -> Objects:
    """Create the client of object stores from a command's S3 options and the environment."""
    from pipeline.storage.s3 import Objects  # noqa: PLC0415 - --help and a mistyped flag answer at once

    return Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)


def report_result(result: CacheCommandResult, say: Say, exit_code: int = 0, **places: str) -> CommandResult:
    """Print the lines of a result, and return it as a CommandResult with ``places`` and its fields as the record."""
    for line in result.lines():
        say(line)
    return CommandResult(exit_code, {**places, **asdict(result)})
