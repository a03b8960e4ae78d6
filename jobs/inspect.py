"""Show a cache or a folder of answers: a summary, one video or question, or the failed items.

With --method: show which tokens of one video several methods keep.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.command import Parser, run_to_exit_code
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import CommandResult, add_json, print_lines
from jobs.frame.stores import VIDEO_ROOT_HELP, make_objects
from pipeline.console import CleanConsole, make_speaker
from pipeline.errors import CorruptShard, NotACache, RunFailed, UnknownVideo, VideoFault
from pipeline.options import S3Options, parse_share
from pipeline.prune.config import ENCODING_OPTIONS, PruneConfig
from pipeline.rows import JsonObject

if TYPE_CHECKING:
    from pipeline.cache.reader import TokenCache
    from pipeline.inspect.report import Failures
    from pipeline.storage.s3 import Objects
    from pipeline.storage.stores import Store


EPILOG = """\
examples:
  python -m jobs.inspect cache                                  a summary
  python -m jobs.inspect cache ID --html page.html --video-root videos
  python -m jobs.inspect VIDEO --method gstep vidcom2 random,seed=0..2 --retention-ratio 25% 10% --html page.html

Exit code: 0 shown; 1 rows of committed videos are lost, a file is damaged, the store failed, your own method fails, or
the run of --watch did not finish; 2 the request was refused, e.g. no such video; 130 interrupted.
"""

#: The options that --help shows.
USUAL = (
    *("place", "item", "failed", "method", "retention_ratio", "html", "video_root", "watch", "json"),
    *("model", "num_frames", "fps", "max_frames"),
)
_ENCODING_FLAGS = ENCODING_OPTIONS - set(S3Options.__dataclass_fields__)


def main(argv: Sequence[str] | None = None) -> int:
    """Show a cache or answers, one item, the failed items or the run under way, or write a video's page.

    With ``--method``, compare the tokens that methods keep of one video. Return the exit code.
    """
    parser = Parser("python -m jobs.inspect", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "place",
        metavar="CACHE|ANSWERS|VIDEO",
        help="the folder, or the s3://, gs:// or az:// prefix, that jobs.prune or jobs.generate wrote; with --method "
        "also a video file",
    )
    parser.add_argument(
        "item",
        metavar="ID",
        nargs="?",
        help="one video of the cache, one question of the answers; of a video file its name on the page",
    )
    parser.add_argument(
        "--failed", action="store_true", help="print only failed items, a line each: id, class, message, tab-separated"
    )
    parser.add_argument(
        "--method",
        nargs="+",
        metavar="METHOD",
        help="with a video: show which tokens these methods keep of the same encoding, each as METHOD or "
        "METHOD,NAME=VALUE,...; seed=0..2 stands for three seeds. On a cache of all tokens they select from the stored "
        "tokens, else the source is encoded again (--video-root)",
    )
    parser.add_argument(
        "--retention-ratio",
        nargs="+",
        metavar="R",
        help="with a video: show a smaller ratio of the same cache; with --method one or several ratios (default: that "
        "of the cache, or 25%%)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="with a video: write a page that shows the kept tokens in its frames"
    )
    video_root_help = VIDEO_ROOT_HELP.format("with --html: show frames of, with --method: encode again,")
    parser.add_argument("--video-root", action="append", default=[], metavar="DIR", help=video_root_help)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the run that writes to the cache, on any machine, until it ends, or wait for a run to begin the "
        "cache; exit code 1 if it did not finish. Without a terminal, print a line each time",
    )
    add_json(parser)
    parser.add_help_all(USUAL)
    add_flags(parser, PruneConfig, _ENCODING_FLAGS)
    add_flags(parser, S3Options)
    arguments = parser.parse_intermixed_args(argv)  # a video's id may come after the flags
    _read_ratios(parser, arguments)
    _check_flags(parser, arguments)
    return run_to_exit_code(
        lambda: _compare(arguments) if arguments.method else _inspect(arguments),
        CleanConsole(stderr=True),
        failures=(CorruptShard, OSError, RunFailed),
        refusals=(ValueError, UnknownVideo, VideoFault),
        interrupt_message="interrupted: the run itself continues" if arguments.watch else "interrupted",
        document=arguments.json,
    )


def _read_ratios(parser: Parser, arguments: argparse.Namespace) -> None:
    """Parse the words after ``--retention-ratio`` into ``retention_ratios``, and set ``retention_ratio`` to the first.

    ``retention_ratio`` is None without the flag. The last of several words becomes the ID if it is not a share and no
    ID was given; any other word that is not a share ends the process with a usage error.
    """
    words, arguments.retention_ratios = arguments.retention_ratio or [], []
    for number, word in enumerate(words, start=1):
        try:
            arguments.retention_ratios.append(parse_share(word))
        except ValueError:
            if number == 1 or number < len(words) or arguments.item is not None:
                parser.error(f"argument --retention-ratio: invalid share value: {word!r}")
            arguments.item = word
    arguments.retention_ratio = next(iter(arguments.retention_ratios), None)


def _check_flags(parser: Parser, arguments: argparse.Namespace) -> None:
    """End the process with a usage error if flags exclude each other, or need ``--method`` or an ID that is not given.

    ``--failed`` and ``--watch`` exclude ``--method``. Without it, options of the encoding (such as ``--num-frames``)
    and several values of ``--retention-ratio`` are errors, and ``_check_item`` checks the rest.
    """
    if arguments.method:
        excluded_flags = [flag for flag in ("failed", "watch") if getattr(arguments, flag)]
        if excluded_flags:
            parser.error(f"--{excluded_flags[0]} cannot be combined with --method")
        return
    encoding_flags = sorted(name for name in _ENCODING_FLAGS if hasattr(arguments, name))
    if encoding_flags:
        parser.error(f"--{encoding_flags[0].replace('_', '-')} goes with --method")
    if len(arguments.retention_ratios) > 1:
        parser.error("several values of --retention-ratio go with --method")
    _check_item(parser, arguments)


def _check_item(parser: Parser, arguments: argparse.Namespace) -> None:
    """End the process with a usage error if flags do not fit the presence of an ID; called only without ``--method``.

    ``--retention-ratio`` and ``--html`` need an ID, ``--failed`` and ``--watch`` exclude it and each other.
    ``--video-root`` needs ``--html``.
    """
    for flag in ("retention_ratio", "html"):
        if getattr(arguments, flag) is not None and arguments.item is None:
            parser.error(f"--{flag.replace('_', '-')} needs a video: name its ID")
    for flag in ("failed", "watch"):
        if getattr(arguments, flag) and arguments.item is not None:
            parser.error(f"--{flag} cannot be combined with an ID")
    if arguments.video_root and arguments.html is None:
        parser.error("--video-root goes with --html or --method")
    if arguments.failed and arguments.watch:
        parser.error("--failed cannot be combined with --watch")


def _inspect(arguments: argparse.Namespace) -> CommandResult:
    """Open the location as a cache or as answers, and show it; ``--watch`` first waits for a cache to begin.

    Raises:
        NotACache: it is neither; the message has a hint if it holds results of jobs.evaluate.
        ValueError: a flag does not apply to answers.
        CorruptShard: a file is damaged.
    """
    from pipeline.cache.header import HEADER  # noqa: PLC0415 - torch and Arrow load only after the flags are checked
    from pipeline.generate.answers import HEADER as ANSWERS_HEADER  # noqa: PLC0415
    from pipeline.storage.stores import store_at  # noqa: PLC0415

    objects = make_objects(from_flags(S3Options, arguments))
    store = store_at(arguments.place, objects)
    if arguments.watch:
        from pipeline.inspect.watch import wait_for_cache  # noqa: PLC0415

        wait_for_cache(store, make_speaker(CleanConsole(stderr=True)))
    if store.exists(HEADER):
        return _show_cache(store, arguments, objects)
    if store.exists(ANSWERS_HEADER):
        return _show_answers(store, arguments)
    if store.exists(f"answers/{ANSWERS_HEADER}"):
        raise NotACache(
            f"{store} holds results of jobs.evaluate: open its report.html, or name {store}/answers or {store}/cache"
        )
    return _show_cache(store, arguments, objects)


def _compare(arguments: argparse.Namespace) -> CommandResult:
    """Show which tokens of a video several methods keep, and write their page with ``--html``.

    Raises:
        UsageError: an option or method cannot be used, or the page cannot be written, which is checked first.
        VideoFault: the video cannot be read or pruned; UnknownVideo if the cache has no tokens of it.
        MethodFails: a user method fails for every video.
    """
    from pipeline.inspect.compare import compare  # noqa: PLC0415 - torch and the decoders load after the flags
    from pipeline.inspect.page import check_page_file  # noqa: PLC0415

    if arguments.html is not None:
        check_page_file(arguments.html)  # before the video is encoded
    comparison = compare(
        arguments.place,
        arguments.item,
        methods=arguments.method,
        retention_ratios=arguments.retention_ratios,
        video_roots=arguments.video_root,
        **{name: getattr(arguments, name) for name in ENCODING_OPTIONS if hasattr(arguments, name)},
    )
    record, output = {**comparison.as_record(), "page": None}, [comparison.report()]
    if arguments.html is not None:
        record["page"] = str(arguments.html)
        output.append(comparison.save(arguments.html))
    return CommandResult(0, record, output)


def _show_answers(store: Store, arguments: argparse.Namespace) -> CommandResult:
    """Show answers: a summary, one question or the failed questions.

    With ``--json`` the result has a record, otherwise a report to print.

    Raises:
        ValueError: a flag applies to caches only.
        UsageError: the question has no answer.
    """
    from pipeline.inspect.answers import Answers, render_answers_report, render_question_report  # noqa: PLC0415

    for flag in ("retention_ratio", "html", "watch"):
        if getattr(arguments, flag):
            raise ValueError(f"--{flag.replace('_', '-')} goes with a cache; {store} holds answers")
    answers = Answers.open(store, arguments.item)
    if arguments.failed:
        return _show_failures(answers.failed(), {"answers": str(store)}, arguments)
    if arguments.item is not None:
        if not arguments.json:
            return CommandResult(0, {}, [render_question_report(answers)])
        return CommandResult(
            0, {"answers": str(store), "question_id": arguments.item, "rows": answers.rows.to_pylist()}
        )
    if not arguments.json:
        return CommandResult(0, {}, [render_answers_report(answers)])
    return CommandResult(0, answers.as_record())


def _show_cache(store: Store, arguments: argparse.Namespace, objects: Objects) -> CommandResult:
    """Show a cache: a summary, one video, the failed videos or its run, or write a video's page.

    With ``--json`` the result has a record, otherwise a report to print. The exit code of a summary is 1 if committed
    videos have lost their rows, and that of ``--watch`` 1 if the run did not finish.

    Args:
        objects: the client for S3, with which a page reads the source.

    Raises:
        UnknownVideo: the cache has no such video.
        ValueError: the ratio cannot be served (RatioNotCached) or the page cannot be written (UsageError).
    """
    from pipeline.cache.reader import TokenCache  # noqa: PLC0415
    from pipeline.inspect import report  # noqa: PLC0415

    video_id, ratio = arguments.item, arguments.retention_ratio
    cache = TokenCache(arguments.place, store=store)
    if arguments.watch:
        return _show_run(cache, arguments)
    if arguments.failed:
        return _show_failures(report.list_failed_videos(cache), {"cache": str(store)}, arguments)
    if video_id is None:
        ledger, summary = report.count_cache(cache)
        code = 1 if summary.n_lost else 0
        if not arguments.json:
            return CommandResult(code, {}, [report.render_cache_report(cache, ledger, summary)])
        return CommandResult(code, report.make_cache_record(cache, ledger, summary))
    if arguments.html is not None:
        from pipeline.inspect.page import write_page  # noqa: PLC0415 - only the page needs the decoders

        line = write_page(cache, video_id, arguments.html, ratio, objects, arguments.video_root)
        return CommandResult(0, {"cache": str(store), "video_id": video_id, "page": str(arguments.html)}, [line])
    if not arguments.json:
        return CommandResult(0, {}, [report.render_video_report(cache, video_id, ratio)])
    return CommandResult(0, report.make_video_record(cache, video_id, ratio))


def _show_run(cache: TokenCache, arguments: argparse.Namespace) -> CommandResult:
    """Show the cache's run until it ends, on stderr with ``--json``, and return its last state.

    The exit code is 1 if the run did not finish, and 0 if the cache has no run.
    """
    from pipeline.inspect.watch import watch  # noqa: PLC0415

    run = watch(cache, CleanConsole(stderr=arguments.json))
    record = None if run is None else asdict(run)
    return CommandResult(
        int(run is not None and run.status != "finished"), {"cache": str(cache.store), "last_run": record}
    )


def _show_failures(failures: Failures, record: JsonObject, arguments: argparse.Namespace) -> CommandResult:
    """Print a line per failed item unless ``--json`` is set, and return ``record`` with their number and the items.

    If there are any and ``--json`` is not set, a note on stderr says how to retry.
    """
    from pipeline.inspect.report import format_failures  # noqa: PLC0415

    if not arguments.json:
        print_lines(format_failures(failures))
        if failures:
            make_speaker(CleanConsole(stderr=True))(
                "note: rerun the command that wrote them with --retry-failed to retry"
            )
    return CommandResult(0, {**record, "n_failed": len(failures), "failed": failures})


if __name__ == "__main__":
    sys.exit(main())
