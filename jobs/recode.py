"""Store the tokens of a cache by another codec in another cache, without a video."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console

from jobs.command import Parser, run_command
from jobs.frame.json_document import Done
from pipeline.cache.codecs import CODECS
from pipeline.errors import UsageError
from pipeline.options import S3Options, check_choices, option

EPILOG = """\
example:
  python -m jobs.recode cache --token-codec int4 --out cache-int4

The source is only read, and must hold bfloat16 tokens. The same command again goes on where the last one stopped, and
takes in what was added to the source since.

Exit code: 0 all videos of the source are there; 1 a file is damaged, or the store failed; 2 usage or refused;
130 interrupted: the same command goes on.
"""


@dataclass(frozen=True, kw_only=True)
class RecodeConfig(S3Options):
    """All options of ``python -m jobs.recode``. Raises UsageError for a value that makes no sense."""

    cache: str | None = option(
        None,
        "the cache to read: a folder, or an s3://, gs:// or az:// prefix",
        positional=True,
        metavar="CACHE",
        group="caches",
    )
    out: str | None = option(None, "the cache to create or to continue", metavar="CACHE")
    gate: str | None = option(
        None,
        "first answer QUESTIONS (as jobs.generate takes them; without a file, fixed prompts) from both, and write "
        "nothing and end with 1 if more answers differ than noise",
        metavar="QUESTIONS",
        const="",
    )
    model: str | None = option(None, "with --gate: the model's folder, if it has one", metavar="MODEL")
    token_codec: str = option("int4", "how tokens are stored there", choices=tuple(CODECS)[1:])

    def __post_init__(self) -> None:
        check_choices(self)
        if not self.cache or not self.out:
            raise UsageError("name the cache to read, and with --out the one to make")


def main(argv: Sequence[str] | None = None) -> int:
    """Store the tokens of a cache by another codec in another cache; return the exit code."""
    parser = Parser(
        "python -m jobs.recode",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return run_command(parser, RecodeConfig, _recode, argv)


def _recode(config: RecodeConfig, console: Console) -> Done:
    """Make a cache of another with its tokens in another codec, print what was done, and return the record."""
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415 - torch and Arrow load after the flags are checked
    from pipeline.rewrite.recode import recoding  # noqa: PLC0415
    from pipeline.rewrite.rewrite import check_place, rewrite  # noqa: PLC0415
    from pipeline.storage.s3 import Objects  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    assert config.cache is not None and config.out is not None
    objects = Objects.from_environment(config.s3_endpoint, config.s3_region)
    source = TokenCache(config.cache, store=store_at(config.cache, objects))
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    what, out = recoding(source, config.token_codec, config.out), store_at(config.out, objects)
    check_place(out, what.header)
    if config.gate is not None:
        from pipeline.rewrite.gate import gate_recoding  # noqa: PLC0415

        what = gate_recoding(what, config.gate, config.model, objects, say)
    done = rewrite(what, out, say)
    for line in done.lines():
        say(line)
    return Done(0, {"cache": config.cache, "out": config.out, "gate": what.header.get("gate"), **asdict(done)})


if __name__ == "__main__":
    sys.exit(main())
