"""Answers from a cache beside answers from the videos: requests a second, time to the first token, reuse, memory."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.shown import figure_table, say
from jobs.command import count, file_in_folder, share
from jobs.frame.json_document import Done, add_json
from pipeline.errors import UsageError

HELP = "answering from a cache, by vLLM and by transformers, beside vLLM on the videos themselves"
MODES = (
    *("cached-vllm", "cached-vllm-rows", "text-vllm", "cached-transformers"),
    *("online-vllm", "online-vllm-evs", "online-vllm-vidcom2"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--model",
        default="tiny-qwen2-5-vl",
        metavar="MODEL",
        help="a Hugging Face id or folder; the default is random and small: its figures say how ways compare, not how "
        "fast a real one is [tiny-qwen2-5-vl]",
    )
    parser.add_argument(
        "--cache",
        metavar="CACHE",
        help="one of the model's whose uris are files [made of the sample clips, all tokens]",
    )
    parser.add_argument("--num-frames", type=count, default=16, metavar="T", help="frames a video [16]")
    parser.add_argument(
        "--retention-ratio", type=share, nargs="+", default=[1.0, 0.25, 0.1], metavar="R", help="[1.0 0.25 0.1]"
    )
    parser.add_argument("--questions", type=count, nargs="+", default=[1, 8], metavar="Q", help="a video [1 8]")
    parser.add_argument("--max-new-tokens", type=count, default=16, metavar="N", help="[16]")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="from a cache by names that vLLM's workers look up, with the rows in each request, and by transformers; "
        "texts as long; from the videos, of all tokens or pruned by vLLM's own methods [all]",
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="times each; medians are shown [3]")
    parser.add_argument("--plot", type=file_in_folder, metavar="FILE.png", help="draw it (needs matplotlib)")
    _add_server_flags(parser)
    add_json(parser)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what is measured of a server instead."""
    parser.add_argument(
        "--crowd",
        type=count,
        metavar="N",
        help="instead: N requests at once to jobs.serve, alone and while another client sends texts of 5 MB",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        metavar="R",
        help="instead: requests to jobs.serve that arrive at random, R a second, each rate cold and then warm, about "
        "videos and in texts as long; without R, rates that double until the server is saturated",
    )
    parser.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="instead: ms until N workers hold the rows of a made-up video, each by itself or by one that reads",
    )


def run(arguments: argparse.Namespace) -> Done:
    """Measure and show."""
    if arguments.plot is not None and (arguments.crowd or find_spec("matplotlib") is None):
        raise UsageError("--plot draws the ways of answering and --rates, not --crowd, and needs matplotlib")
    from jobs.benchmark.serving.times import check, device, make_cache  # noqa: PLC0415 - torch loads after the flags

    if arguments.workers is not None:
        from jobs.benchmark.serving import workers  # noqa: PLC0415

        shared = workers.measure_workers(arguments.workers, arguments.repeats)
        return Done(0, {"workers": shared, "machine": machine(device())}, [workers.as_table(shared)])
    check(arguments.modes)
    measured = _ways if arguments.rates is None and arguments.crowd is None else _server
    with TemporaryDirectory() as folder:
        cache = arguments.cache
        if cache is None:
            say("making a cache of the sample clips")
            cache = make_cache(Path(folder) / "cache", arguments.model, arguments.num_frames)
        return measured(cache, arguments)


def _ways(cache: str, arguments: argparse.Namespace) -> Done:
    """Measure the ways of answering, and draw them."""
    from jobs.benchmark.serving.times import as_table, device, measure  # noqa: PLC0415 - as above
    from jobs.benchmark.serving.ways import Job  # noqa: PLC0415

    job = Job(
        model=arguments.model,
        cache=cache,
        num_frames=arguments.num_frames,
        ratios=tuple(sorted(arguments.retention_ratio, reverse=True)),
        questions=tuple(arguments.questions),
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
    )
    found = []
    for mode in arguments.modes:
        say(f"{mode}: a process of its own")
        found += measure(mode, job)
    title = f"{arguments.model} on {machine_line(device())}"
    if arguments.plot is not None:
        from jobs.benchmark.serving.plot import write_plot  # noqa: PLC0415 - needs the extra benchmark

        write_plot(found, title, arguments.plot)
    return Done(0, {"machine": machine(device()), "job": job, "measured": found}, [as_table(found, title)])


def _server(cache: str, arguments: argparse.Namespace) -> Done:
    """Measure how long requests to a server take: those that arrive at given rates, or a crowd's."""
    from jobs.benchmark.serving.times import device  # noqa: PLC0415 - as above

    about = {"machine": machine(device())}
    if arguments.rates is not None:
        from jobs.benchmark.serving import open_loop  # noqa: PLC0415

        arrived = open_loop.measure_open(cache, arguments.rates, arguments.questions)
        if arguments.plot is not None:
            from jobs.benchmark.serving.plot import write_rates  # noqa: PLC0415 - needs the extra benchmark

            write_rates(arrived, arguments.plot)
        return Done(0, {**about, "open_loop": arrived}, [open_loop.as_table(arrived)])
    from jobs.benchmark.serving.crowd import measure_crowd  # noqa: PLC0415

    alone, beside = found = measure_crowd(cache, arguments.crowd, arguments.repeats)
    table = figure_table(
        f"{arguments.crowd} requests at once to jobs.serve, {arguments.model}",
        ("texts of 5 MB meanwhile", "p50, s", "p99, s"),
        [(str(waited.n_large), f"{waited.p50_s:.2f}", f"{waited.p99_s:.2f}") for waited in found],
    )
    return Done(0, {**about, "crowd": found, "p99_ratio": beside.p99_s / alone.p99_s}, [table])
