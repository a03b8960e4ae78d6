"""Answers from a cache beside answers from the videos: requests per second, time to first token, reuse, memory."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import cast

import torch
from rich.table import Table

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.serving.live import check_live_model
from gstep.serving.options import prepare_process
from jobs.benchmark.serving_ways import (
    CACHED,
    MODES,
    ONLINE,
    PRUNING,
    CachedWay,
    OnlineWay,
    Pass,
    ServingWay,
    ServingWork,
    list_whole_files,
)
from jobs.benchmark.shared import ProcessTree, describe_machine, format_machine, make_figure_table, say
from jobs.command import count, parse_output_file, share
from jobs.frame.json_document import CommandResult
from pipeline import TokenCache
from pipeline.errors import RunFailed, UsageError, convert_usage_errors
from pipeline.generate.engines import VLLM
from pipeline.generate.engines.vllm import check_installed

_CAUSE = re.compile(r"^.*?\b([A-Z]\w*(?:Error|Exception): .+)$", re.M)  # the last line of a traceback


@dataclass(frozen=True)
class WayResult:
    """The median measurements for one way, ratio and number of questions per video.

    Attributes:
        requests_per_s: if nothing of their videos is cached, including reading tokens (or decoding and encoding
            videos).
        warm_requests_per_s: when the same requests are repeated.
        first_token_s: seconds to the first token of the median request if nothing is cached; None if unknown.
        reused: the share of the prompts' tokens that the prefix cache had; None if unknown.
        visual_tokens: the mean per prompt; None for texts.
        prefilled_tokens: mean tokens per request that the model reads if nothing is cached before.
        sent_kb: kilobytes (10^3) per question sent to the engine's process; None for an engine in this process.
        peak_mb: the maximum over passes of the memory of all processes together (PSS, in which shared pages count
            once).
        gpu_mb: the peak of torch's GPU memory in the benchmark's process, without vLLM's engine; None without a GPU.
    """

    mode: str
    retention_ratio: float
    questions: int
    requests: int
    requests_per_s: float
    warm_requests_per_s: float
    first_token_s: float | None
    reused: float | None
    visual_tokens: float | None
    prefilled_tokens: float
    sent_kb: float | None
    peak_mb: float
    gpu_mb: float | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--model",
        default="tiny-qwen2-5-vl",
        metavar="MODEL",
        help="a Hugging Face id or folder; the default is random and small: its figures compare ways; they are not "
        "speeds of a real model [tiny-qwen2-5-vl]",
    )
    parser.add_argument(
        "--cache",
        metavar="CACHE",
        help="a cache of the model; online-vllm needs its videos as local files [made of the sample clips, all tokens]",
    )
    parser.add_argument("--num-frames", type=count, default=16, metavar="T", help="frames per video [16]")
    parser.add_argument(
        "--retention-ratio",
        type=share,
        nargs="+",
        default=[1.0, 0.25, 0.1],
        metavar="R",
        help="kept shares [1.0 0.25 0.1]",
    )
    parser.add_argument(
        "--questions", type=count, nargs="+", default=[1, 8], metavar="Q", help="questions per video [1 8]"
    )
    parser.add_argument("--max-new-tokens", type=count, default=16, metavar="N", help="tokens of an answer [16]")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        help="from a cache by vLLM and by transformers; from texts of the same length; from the videos by vLLM alone, "
        "with live pruning by gstep, and with vLLM's own evs [all that the model has]",
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="measure N times, and show medians [3]")
    parser.add_argument(
        "--plot", type=parse_output_file, metavar="FILE.png", help="draw the results (needs matplotlib)"
    )


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure every mode in its own process, and return the table of results.

    Without ``--cache``, a temporary cache of the sample clips is made. With ``--plot``, a picture is written.

    Raises:
        UsageError: a package is not installed, or a mode cannot be used with the model or the cache.
        RunFailed: a process fails.
    """
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    modes = choose_modes(arguments.modes, arguments.model)
    if any(VLLM in mode for mode in modes):
        check_installed("jobs.benchmark serving")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = list[WayResult]()
    with TemporaryDirectory() as folder:
        cache = arguments.cache
        if cache is None:
            say("making a cache of the sample clips")
            cache = make_cache(Path(folder) / "cache", arguments.model, arguments.num_frames)
        if {ONLINE, *PRUNING} & set(modes):
            list_whole_files(TokenCache(cache))
        job = ServingWork(
            model=arguments.model,
            cache=cache,
            num_frames=arguments.num_frames,
            ratios=tuple(sorted(arguments.retention_ratio, reverse=True)),
            questions=tuple(arguments.questions),
            max_new_tokens=arguments.max_new_tokens,
            repeats=arguments.repeats,
        )
        for mode in modes:
            say(f"{mode}: a process of its own")
            for part in split_work(mode, job):
                results += measure(mode, part)
    title = f"{arguments.model} on {format_machine(device)}"
    if arguments.plot is not None:
        write_plot(results, title, arguments.plot)
    return CommandResult(
        0, {"machine": describe_machine(device), "job": job, "measured": results}, [make_table(results, title)]
    )


def choose_modes(names: Sequence[str] | None, model: str) -> list[str]:
    """Return the modes to measure: the named ones, or without names all that work with the model.

    The model is looked up if a pruning mode is named, and without names.

    Raises:
        UsageError: vLLM cannot prune this model and a pruning mode is named, or the model cannot be found.
    """
    if not set(names or PRUNING) & PRUNING.keys():
        return list(names or MODES)
    with convert_usage_errors():
        source = ModelSource.resolve(model)
    try:
        check_live_model(source)
    except ModelError as error:
        if names is not None:
            raise UsageError(str(error)) from error
        return [mode for mode in MODES if mode not in PRUNING]
    return list(names or MODES)


def split_work(mode: str, job: ServingWork) -> list[ServingWork]:
    """Split the work into the tasks that each get a process.

    The way without pruning has the ratio 1 only; pruning ways have a task per ratio and skip the ratio 1, so that the
    list may be empty.
    """
    if mode == ONLINE:
        return [replace(job, ratios=(1.0,))]
    if mode in PRUNING:
        return [replace(job, ratios=(ratio,)) for ratio in job.ratios if ratio < 1.0]
    return [job]


def make_cache(folder: Path, model: str, num_frames: int) -> str:
    """Make a cache of all tokens of the sample clips, which serves any ratio; return its path.

    Raises:
        RunFailed: jobs.prune failed.
    """
    command = [sys.executable, "-m", "jobs.prune", "sample", "--out", str(folder), "--model", model]
    command += ["--retention-ratio", "1.0", "--num-frames", str(num_frames)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RunFailed(f"jobs.prune: {process.stdout[-1000:]}{process.stderr[-1000:]}")
    return str(folder)


def measure(mode: str, job: ServingWork) -> list[WayResult]:
    """Measure one mode in a new child process, and wait for it without a time limit.

    An interrupt, or another exception in this process, kills the child and its processes.

    Raises:
        RunFailed: the child failed or crashed. The message has the last error in the child's output (a line such as
            "ValueError: ..."), otherwise the error that the child sent, or its exit code.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with NamedTemporaryFile("r", errors="replace") as log:
        child = context.Process(target=_measure_in_child, args=(mode, job, sender, log.name))
        child.start()
        sender.close()
        try:
            answer: list[WayResult] | str = receiver.recv()
        except EOFError:
            child.join()
            answer = f"the process crashed (exit code {child.exitcode})"
        except BaseException:  # an interrupt: the engine's process must end too
            ProcessTree(cast(int, child.pid)).end()
            raise
        child.join()
        if isinstance(answer, str):
            # The cause of an engine's crash is in its log; its client only knows that it crashed.
            causes = _CAUSE.findall(log.read())
            raise RunFailed(f"{mode}: {causes[-1] if causes else answer}")
    return answer


def _measure_in_child(mode: str, job: ServingWork, pipe: Connection, log: str) -> None:
    """Measure in the child process, and send the results, or the text of the error, through ``pipe``.

    Stdout and stderr of the process go to the file ``log``.
    """
    with Path(log).open("a") as log_file:
        for stream in (1, 2):
            os.dup2(log_file.fileno(), stream)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        if VLLM in mode:  # with its engine in a separate process, as in servers
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
            prepare_process("cuda" if torch.cuda.is_available() else "cpu", 1, multiprocessing=True)
        way: ServingWay = CachedWay(mode, job) if mode in CACHED else OnlineWay(mode, job)
        try:
            pipe.send(list(_measure_way(way, mode, job)))
        finally:
            way.close()
    except Exception as error:  # noqa: BLE001 - the parent reports it
        pipe.send(f"{type(error).__name__}: {error}")


def _measure_way(way: ServingWay, mode: str, job: ServingWork) -> Iterator[WayResult]:
    """Yield a result for each ratio and number of questions; every round asks cold, and then the same again warm.

    There are ``job.repeats`` rounds, of which medians are taken. One question per video, at the first ratio, is asked
    before, as a warm-up. ``peak_mb`` is the maximum of all rounds so far.
    """
    way.make_ask(job.ratios[0], 1)()  # loading and compiling on first use are not measured
    memory = ProcessTree(os.getpid())
    for ratio in job.ratios:
        for questions in job.questions:
            cold, warm = list[Pass](), list[Pass]()
            for _ in range(job.repeats):
                ask = way.make_ask(ratio, questions)
                cold.append(ask())
                warm.append(ask())
                memory.look(memory=True)
            requests = cold[0].requests
            first_token_s = [p.first_token_s for p in cold if p.first_token_s is not None]
            sent_bytes = [p.sent_bytes for p in cold if p.sent_bytes is not None]
            reused = [p.reused_tokens / p.prompt_tokens for p in cold if p.reused_tokens is not None]
            yield WayResult(
                mode=mode,
                retention_ratio=ratio,
                questions=questions,
                requests=requests,
                requests_per_s=requests / median(p.seconds for p in cold),
                warm_requests_per_s=requests / median(p.seconds for p in warm),
                first_token_s=median(first_token_s) if first_token_s else None,
                reused=median(reused) if reused else None,
                visual_tokens=cold[0].visual_tokens,
                prefilled_tokens=median(p.prompt_tokens - (p.reused_tokens or 0) for p in cold) / requests,
                sent_kb=median(sent_bytes) / requests / 1e3 if sent_bytes else None,
                peak_mb=memory.peak_mb,
                gpu_mb=torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None,
            )


def make_table(results: Sequence[WayResult], title: str) -> Table:
    """Make a table with a row per result, whose cells are "" for unknown figures.

    "times" is the speed relative to online vLLM with as many questions, if that was measured.
    """
    columns = (
        *("way", "retention", "questions a video", "visual tokens", "requests/s", "warm", "times"),
        *("first token s", "prefilled", "reused", "kB sent", "peak MB"),
    )
    online, rows = {result.questions: result.requests_per_s for result in results if result.mode == ONLINE}, []
    for result in results:
        speed, base = result.requests_per_s, online.get(result.questions)
        figures = (
            *((result.visual_tokens, ".0f"), (speed, ".2f"), (result.warm_requests_per_s, ".2f")),
            *((speed / base if base else None, ".1f"), (result.first_token_s, ".3f"), (result.prefilled_tokens, ".0f")),
            *((result.reused, ".0%"), (result.sent_kb, ".1f"), (result.peak_mb, ".0f")),
        )
        cells = ("" if value is None else format(value, form) for value, form in figures)
        rows.append((result.mode, f"{100 * result.retention_ratio:g}%", str(result.questions), *cells))
    return make_figure_table(title, columns, rows)


def write_plot(results: Sequence[WayResult], title: str, file: Path) -> None:
    """Write a PNG of requests per second by questions per video, cold and warm; colors are ways, dashes are ratios."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - the extra ``benchmark``

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lines = dict.fromkeys((result.mode, result.retention_ratio) for result in results)
    colors = {mode: f"C{number}" for number, mode in enumerate(dict.fromkeys(mode for mode, _ in lines))}
    dashes = dict(zip(dict.fromkeys(ratio for _, ratio in lines), cycle(("-", "--", ":", "-.")), strict=False))
    x_of_questions = {number: x for x, number in enumerate(sorted({result.questions for result in results}))}
    for panel, warm in zip(panels, (False, True), strict=True):
        for mode, ratio in lines:
            line_results = [result for result in results if (result.mode, result.retention_ratio) == (mode, ratio)]
            speeds = [result.warm_requests_per_s if warm else result.requests_per_s for result in line_results]
            style = {"color": colors[mode], "linestyle": dashes[ratio], "marker": "o"}
            panel.plot(
                [x_of_questions[result.questions] for result in line_results],
                speeds,
                label=f"{mode}, {100 * ratio:g}%",
                **style,
            )
        panel.set_yscale("log")
        panel.set_xticks(list(x_of_questions.values()), [str(number) for number in x_of_questions])
        panel.set_xlabel("questions a video, " + ("asked again" if warm else "nothing cached"))
    panels[0].set_ylabel("requests/s")
    panels[1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, format="png", dpi=110)
