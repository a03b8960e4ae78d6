"""Prune a cache of all tokens by a method into another cache, without a video or an encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console

from gstep.methods import VIDEO_METHODS
from jobs.command import RERUN, STORE_FAILURES, Parser, run_command
from jobs.frame.json_document import CommandResult
from jobs.frame.rewriting import RewriteOptions, rewrite_cache
from pipeline.cache.codecs import BFLOAT16, CODECS
from pipeline.options import REQUIRED, check, check_ratio, option, parse_named_values

EPILOG = """\
example:
  python -m jobs.prune videos/ --pruner none --retention-ratio 1 --evidence fastvid --out whole
  python -m jobs.reprune whole --pruner fastvid --retention-ratio 0.10 --out fastvid-10

The new cache is bit for bit as python -m jobs.prune would write it, and jobs.prune can add videos to it. Rerun the same
command to resume, or to add new videos of WHOLE.

Exit code: 0 all videos of WHOLE are in --out; 1 the method could not prune a video, a file is damaged, or the store
failed; 2 usage or refused; 130 interrupted: rerun the same command to resume.
"""


@dataclass(frozen=True, kw_only=True)
class RepruneConfig(RewriteOptions):
    """All options of ``python -m jobs.reprune``. An invalid value raises UsageError."""

    role: ClassVar[str] = "whole"

    whole: str = option(
        REQUIRED, "the cache of all tokens (jobs.prune --pruner none)", positional=True, metavar="WHOLE", group="caches"
    )
    pruner: str = option(
        "gstep",
        f"pruning method: {', '.join(VIDEO_METHODS)}, or module:Class of your own",
        metavar="METHOD",
        group="pruning",
    )
    pruner_param: list[str] = option(
        [], "a parameter of the method, e.g. alpha=0.5 or K=3; may be repeated", metavar="NAME=VALUE"
    )
    retention_ratio: float = option(
        0.25, "share of the visual tokens that is kept: 0.25 or 25%%", metavar="R", share=True
    )
    seed: int = option(0, "seed of the methods that draw random numbers", metavar="N")
    token_codec: str = option(BFLOAT16.name, "the codec of the new cache", choices=tuple(CODECS))

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value; unknown methods and parameters are refused later."""
        super().__post_init__()
        check_ratio("retention_ratio", self.retention_ratio)
        check(self.seed >= 0, "seed", "at least 0", self.seed)
        self.pruner_params()

    def pruner_params(self) -> dict[str, str]:
        """Return the texts of ``--pruner-param`` by name; raise UsageError if an entry is not NAME=VALUE."""
        return parse_named_values(self.pruner_param, "--pruner-param")


def main(argv: Sequence[str] | None = None) -> int:
    """Prune a cache of all tokens into another cache; return the exit code."""
    parser = Parser("python -m jobs.reprune", description=__doc__, epilog=EPILOG)
    return run_command(parser, RepruneConfig, _reprune, argv, interrupt_message=RERUN, failures=STORE_FAILURES)


def _reprune(config: RepruneConfig, console: Console) -> CommandResult:
    """Prune a cache of all tokens into ``--out``, print the result, and return its record.

    Raises:
        UsageError: the source does not have all tokens in bfloat16, or the method or ``--out`` cannot be used.
        RunFailed: another cache was begun at ``--out`` meanwhile, or a user method fails for every video.
        CorruptShard: the source is damaged.
    """
    from pipeline.rewrite.reprune import plan_repruning  # noqa: PLC0415 - torch and Arrow load after the flags are checked

    method, params, codec = config.pruner, config.pruner_params(), config.token_codec
    return rewrite_cache(
        config,
        console,
        lambda source: plan_repruning(source, method, params, config.retention_ratio, config.seed, codec),
    )


if __name__ == "__main__":
    sys.exit(main())
