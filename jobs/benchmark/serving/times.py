"""What answering costs: every way in a process of its own, on the same questions about the same videos."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import cast

import torch
from rich.table import Table

from gstep.serving.options import prepare_process
from jobs.benchmark.pipeline.processes import ProcessTree
from jobs.benchmark.serving.cached import CachedWay
from jobs.benchmark.serving.online import ONLINE, OnlineWay
from jobs.benchmark.serving.ways import Job, Pass, Way
from jobs.benchmark.shown import figure_table
from pipeline.errors import RunFailed
from pipeline.generate.engines import VLLM
from pipeline.generate.engines.vllm import check_installed

_CAUSE = re.compile(r"^.*?\b([A-Z]\w*(?:Error|Exception): .+)$", re.M)  # the last line of a traceback


@dataclass(frozen=True)
class Measured:
    """The median measurements of one way, ratio and number of questions a video.

    Attributes:
        requests: in a pass, all given at once.
        requests_per_s: answered where nothing of their videos is held; reading tokens (or decoding and encoding videos)
            included. None where there is no such way.
        warm_requests_per_s: of the same requests once more.
        first_token_s: of the median request, where nothing is held; None where a way does not say.
        reused: share of the prompts' tokens that the prefix cache had; None likewise.
        visual_tokens: in a prompt, on average.
        sent_kb: kilobytes (10^3) that went to the engine's process, a question; None where it has none of its own.
        peak_mb: memory of all processes together, with the model (PSS, in which shared pages count once), at the end of
            the pass that had most.
        gpu_mb: highest of torch's GPU memory in the process of the benchmark: vLLM's engine has another. None without a
            GPU.
        note: why there are no figures.
    """

    mode: str
    retention_ratio: float
    questions: int
    requests: int
    requests_per_s: float | None = None
    warm_requests_per_s: float | None = None
    first_token_s: float | None = None
    reused: float | None = None
    visual_tokens: float | None = None
    sent_kb: float | None = None
    peak_mb: float | None = None
    gpu_mb: float | None = None
    note: str = ""


def device() -> str:
    """Return the device that answers are computed on, "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check(modes: Sequence[str]) -> None:
    """Raise UsageError where vLLM is asked for and missing."""
    if any(VLLM in mode for mode in modes):
        check_installed("jobs.benchmark serving")


def make_cache(folder: Path, model: str, num_frames: int) -> str:
    """Make a cache of the sample clips with every token in GSTEP's order, so of every ratio. Raises RunFailed."""
    command = [sys.executable, "-m", "jobs.prune", "sample", "--out", str(folder), "--model", model]
    command += ["--retention-ratio", "1.0", "--num-frames", str(num_frames)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(f"jobs.prune: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return str(folder)


def measure(mode: str, job: Job) -> list[Measured]:
    """Measure one way of answering, in a process of its own for each engine. Raises RunFailed where it fails.

    A method of vLLM's own that prunes videos needs an engine for each ratio; a model that it is not for has no figures.
    """
    if not ONLINE.get(mode):
        return _in_child(mode, replace(job, ratios=(1.0,)) if mode in ONLINE else job)
    found: list[Measured] = []
    for ratio in (ratio for ratio in job.ratios if ratio < 1.0):
        try:
            found += _in_child(mode, replace(job, ratios=(ratio,)))
        except RunFailed as error:
            note = " ".join(str(error).partition(": ")[2].split())[:300]
            found += [Measured(mode, ratio, number, 0, note=note) for number in job.questions]
    return found


def _in_child(mode: str, job: Job) -> list[Measured]:
    """Measure in a child process, whose memory ends with it. Raises RunFailed where it fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with NamedTemporaryFile("r", errors="replace") as log:
        child = context.Process(target=_child, args=(mode, job, theirs, log.name))
        child.start()
        theirs.close()
        try:
            found: list[Measured] | str = ours.recv()
        except EOFError:
            child.join()
            found = f"the process died (exit code {child.exitcode})"
        except BaseException:  # an interruption, which its engine's process must not outlive
            ProcessTree(cast(int, child.pid)).end()
            raise
        child.join()
        if isinstance(found, str):
            # What an engine dies of is in its log; the process that asked knows only that it died.
            causes = _CAUSE.findall(log.read())
            raise RunFailed(f"{mode}: {causes[-1] if causes else found}")
    return found


def _child(mode: str, job: Job, pipe: Connection, log: str) -> None:
    """Measure in the child process, and send the results or the error's text through the pipe; prints go to ``log``."""
    with Path(log).open("a") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        if VLLM in mode:  # with its engine in a process of its own, as servers have it
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
            prepare_process(device(), 1, multiprocessing=True)
        way: Way = OnlineWay(mode, job) if mode in ONLINE else CachedWay(mode, job)
        try:
            pipe.send(list(_measure(way, mode, job)))
        finally:
            way.close()
    except Exception as error:  # noqa: BLE001 - the parent says it
        pipe.send(f"{type(error).__name__}: {error}")


def _measure(way: Way, mode: str, job: Job) -> Iterator[Measured]:
    """Yield one result a ratio and number of questions: each round is asked once cold, and then the same again."""
    way.fresh(job.ratios[0], 1)()  # what is loaded and compiled on first use does not count
    memory = ProcessTree(os.getpid())
    for ratio in job.ratios:
        for questions in job.questions:
            cold, warm = list[Pass](), list[Pass]()
            for _ in range(job.repeats):
                ask = way.fresh(ratio, questions)
                cold.append(ask())
                warm.append(ask())
                memory.look(memory=True)
            yield _result(Measured(mode, ratio, questions, 0), cold, warm, memory.peak_mb)


def _result(about: Measured, cold: Sequence[Pass], warm: Sequence[Pass], peak_mb: float) -> Measured:
    """Return the measurements of all rounds as one, with the medians of what differs between them."""
    any_pass = cold[0]
    requests = any_pass.requests
    firsts = [one.first_token_s for one in cold if one.first_token_s is not None]
    sent = [one.sent_bytes for one in cold if one.sent_bytes is not None]
    reused = [one.reused_tokens / one.prompt_tokens for one in cold if one.reused_tokens is not None]
    return replace(
        about,
        requests=requests,
        requests_per_s=requests / median(one.seconds for one in cold),
        warm_requests_per_s=requests / median(one.seconds for one in warm),
        first_token_s=median(firsts) if firsts else None,
        reused=median(reused) if reused else None,
        visual_tokens=any_pass.visual_tokens,
        sent_kb=median(sent) / requests / 1e3 if sent else None,
        peak_mb=peak_mb,
        gpu_mb=torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None,
    )


def as_table(found: Sequence[Measured], title: str) -> Table:
    """Lay out a row a measurement; ``times`` is the speed-up over vLLM on videos with as many questions a video."""
    columns = (
        *("way", "retention", "questions a video", "visual tokens", "requests/s", "warm", "times"),
        *("first token s", "reused", "kB sent", "peak MB"),
    )
    online, rows = {one.questions: one.requests_per_s for one in found if one.mode == "online-vllm"}, []
    for one in found:
        speed, base = one.requests_per_s, online.get(one.questions)
        figures = (
            *((one.visual_tokens, ".0f"), (speed, ".2f"), (one.warm_requests_per_s, ".2f")),
            *((speed / base if speed and base else None, ".1f"), (one.first_token_s, ".3f")),
            *((one.reused, ".0%"), (one.sent_kb, ".1f"), (one.peak_mb, ".0f")),
        )
        shown = ("" if value is None else format(value, form) for value, form in figures)
        rows.append((one.mode, f"{100 * one.retention_ratio:g}%", str(one.questions), *shown))
    notes = sorted({f"{one.mode}: {one.note}" for one in found if one.note})
    return figure_table(title, columns, rows, "\n".join(notes) or None)
