"""Store the tokens of a cache by another codec in another cache, without a video."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console

from jobs.command import RERUN, STORE_FAILURES, Parser, run_command
from jobs.frame.json_document import CommandResult
from jobs.frame.rewriting import RewriteOptions, rewrite_cache
from pipeline.cache.codecs import CODECS
from pipeline.options import REQUIRED, option

EPILOG = """\
example:
  python -m jobs.recode cache --token-codec int4 --out cache-int4

The source is only read, and must have bfloat16 tokens. Rerun the same command to resume, or to add new videos of the
source.

Exit code: 0 all videos of the source are in --out; 1 the codec has no scales for a video, a file is damaged, or the
store failed; 2 usage or refused; 130 interrupted: rerun the same command to resume.
"""


@dataclass(frozen=True, kw_only=True)
class RecodeConfig(RewriteOptions):
    """All options of ``python -m jobs.recode``. An invalid value raises UsageError."""

    role: ClassVar[str] = "cache"

    cache: str = option(
        REQUIRED,
        "the cache to read: a folder, or an s3://, gs:// or az:// prefix",
        positional=True,
        metavar="CACHE",
        group="caches",
    )
    token_codec: str = option("int4", "the codec of the new cache", choices=tuple(CODECS)[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tokens of a cache in another codec to another cache; return the exit code."""
    parser = Parser("python -m jobs.recode", description=__doc__, epilog=EPILOG)
    return run_command(parser, RecodeConfig, _recode, argv, interrupt_message=RERUN, failures=STORE_FAILURES)


def _recode(config: RecodeConfig, console: Console) -> CommandResult:
    """Rewrite the cache in another codec into ``--out``, print the result, and return its record.

    Raises:
        UsageError: the source does not store bfloat16, or ``--out`` cannot be used.
        RunFailed: another cache was begun at ``--out`` meanwhile.
        CorruptShard: the source is damaged.
    """
    from pipeline.rewrite.recode import plan_recoding  # noqa: PLC0415 - torch and Arrow load after the flags are checked

    return rewrite_cache(config, console, lambda source: plan_recoding(source, config.token_codec))


if __name__ == "__main__":
    sys.exit(main())
