"""The paper's efficiency figures (Table 3): E2E and LLM seconds, peak memory, KV cache, tokens a second.

The same questions are asked of a cache of the videos' tokens, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from jobs.benchmark.efficiency_bench import ArmResult, Bench, Measurement, Sample, prepare_measurement
from jobs.benchmark.shared import figure_table, machine, machine_line, say
from jobs.command import count, file_in_folder, share, throttle
from jobs.frame.json_document import CommandResult
from pipeline.evaluate.forms import escape_latex
from pipeline.evaluate.tabulate import method_title
from pipeline.options import ATTN, DEVICES, DTYPES

Row = dict[str, Any]  # an arm's figures by name, JSON-able
METHODS = ("fastv", "fastvid", "cdpruner", "vidcom2", "gstep")  # methods of the paper's Table 3, in its order
MIB, GIB = 2**20, 2**30
_PROGRESS_S = 5.0  # seconds between two lines of progress
#: Figure of a row -> the field of online samples whose median and range it is. ``online_s`` is the paper's E2E, from
#: the video to the answer. ``llm_with_tower_s`` are encoding, pruning and the whole ``generate``, as in the paper;
#: ``llm_s`` is ``generate`` alone.
_ONLINE = {
    **{name: name for name in ("video_decode_s", "encode_s", "prune_s", "prompt_s", "prefill_s", "token_decode_s")},
    **{name: name for name in ("llm_s", "llm_with_tower_s", "prefill_rate", "decode_rate")},
    "online_s": "total_s",
}
_CACHED = {"read_s": "read_s", "cached_llm_s": "llm_s", "cached_s": "total_s"}  # the same for samples from the cache
#: The printed tables: a line about the table -> its columns, title -> figure. {memory} is the measured memory.
_TABLES = {
    "online, medians of a question; in % the change to full retention": {
        "visual tokens": "visual_tokens",
        "E2E s": "online_s",
        "LLM s with tower": "llm_with_tower_s",
        "LLM s without tower": "llm_s",
        "{memory}": "online_peak_bytes",
        "KV MiB": "kv_bytes",
    },
    "parts of it; tokens/s of the prompt, and of the answer after its first token": {
        "read video s": "video_decode_s",
        "encode s": "encode_s",
        "prune s": "prune_s",
        "prompt s": "prompt_s",
        "prefill s": "prefill_s",
        "prefill tokens/s": "prefill_rate",
        "decode s": "token_decode_s",
        "decode tokens/s": "decode_rate",
    },
    "from a cache of its tokens (no vision tower in memory), seconds to cache a video,\n"
    "and from how many questions about a video on caching takes less time": {
        "online s": "online_s",
        "cached s": "cached_s",
        "of it read s": "read_s",
        "of it LLM s": "cached_llm_s",
        "read MB": "bytes_read",
        "{memory}": "cached_peak_bytes",
        "build s": "build_s",
        "break-even": "break_even",
        "same answers": "same_answers",
    },
}
_FIGURES_WITH_CHANGE = ("online_s", "llm_with_tower_s", "llm_s", "online_peak_bytes", "kv_bytes")  # in the first table
#: End of a figure's name -> its printed unit and digits; other figures are whole numbers.
_UNITS = {"_s": (1, 3), "_rate": (1, 1), "peak_bytes": (GIB, 2), "kv_bytes": (MIB, 1), "bytes_read": (10**6, 2)}
_LATEX_HEADS = ("E2E (s)↓", "LLM Time (s)↓", "GPU (GB)↓", "KV (MB)↓")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``efficiency``."""
    parser.add_argument(
        "--model",
        default="tiny-qwen2-5-vl",
        metavar="MODEL",
        help="a Hugging Face id or folder; a folder with a config.json and no weights gets random weights "
        "[tiny-qwen2-5-vl, random and small: its figures compare methods, they are no speeds of a real model]",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="use seeded random weights instead of the model's"
    )
    parser.add_argument("--siglip", metavar="MODEL", help="for fastvid and cdpruner on LLaVA-OneVision")
    parser.add_argument(
        "--method",
        nargs="+",
        default=list(METHODS),
        metavar="METHOD",
        help=f"parameters after commas, fastv,K=3; full retention is always measured too [{' '.join(METHODS)}]",
    )
    parser.add_argument(
        "--retention-ratio",
        type=share,
        nargs="+",
        default=[0.25, 0.15],
        metavar="R",
        help="kept shares [0.25 0.15, the paper's]",
    )
    parser.add_argument(
        "--videos", default="sample", metavar="VIDEOS", help="the videos, as VIDEOS of jobs.prune [sample]"
    )
    parser.add_argument("--num-frames", type=count, default=32, metavar="T", help="frames a video [32]")
    parser.add_argument("--questions", type=count, default=1, metavar="Q", help="questions a video [1]")
    parser.add_argument(
        "--max-new-tokens", type=count, default=16, metavar="N", help="exact number of tokens of every answer [16]"
    )
    parser.add_argument("--device", default="auto", choices=DEVICES, help="device of the model [auto]")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: bfloat16 on GPUs, else float32 [auto]")
    parser.add_argument("--attn", default="auto", choices=ATTN, help="attention kernel [auto]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="measure N times, and show medians [3]")
    parser.add_argument("--latex", type=file_in_folder, metavar="FILE", help="write the paper's Table 3 there")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Run the benchmark, write the paper's table to the file of ``--latex``, and return the tables to print.

    Raises RunFailed, UsageError, and OSError if the file cannot be written.
    """
    with TemporaryDirectory() as folder:
        job = prepare_measurement(Path(folder), arguments)
        with closing(Bench(job, Path(folder), throttle(say, _PROGRESS_S))) as bench:
            results = bench.run()
    rows = [summarise(result) for result in results]
    title = _make_title(job, arguments, rows[0]["visual_tokens"])
    memory = "GPU GiB" if job.runtime.device != "cpu" else "process's GiB"
    if arguments.latex is not None:
        arguments.latex.write_text(table3(results, title, memory), encoding="utf-8")
    flags = {name: value for name, value in vars(arguments).items() if name not in ("run", "json", "latex")}
    samples = [
        {
            "method": result.arm.method,
            "retention_ratio": result.arm.retention_ratio,
            **asdict(sample),
            "total_s": sample.total_s,
        }
        for result in results
        for sample in (*result.online, *result.cached)
    ]
    about = {"machine": machine(job.runtime.device), "runtime": job.runtime.describe(), "random_weights": job.random}
    record = {"title": title, "memory": memory, **about, "arguments": flags, "rows": rows, "samples": samples}
    return CommandResult(0, record, list(tables(rows, title, memory)))


def _make_title(job: Measurement, arguments: argparse.Namespace, visual_tokens: float) -> str:
    """Describe model, machine and workload in one line for the tables' title."""
    runtime, n_videos = job.runtime, job.manifest.num_rows
    model = f"{job.recipe.source.name}{' with random weights' if job.random else ''}"
    machine_text = f"{machine_line(runtime.device)}, {runtime.dtype_name}, attention {runtime.attn_implementation}"
    workload = (
        f"{arguments.num_frames} frames, {visual_tokens:.0f} visual tokens, {arguments.max_new_tokens} new tokens"
    )
    return (
        f"{model} on {machine_text}; {workload}; {n_videos} videos x {job.questions} questions x {job.repeats} repeats"
    )


def summarise(result: ArmResult) -> Row:
    """Summarise an arm's samples in a row: medians with their range, memory peaks, and the break-even of a cache.

    ``same_answers`` is True if online and cached answers are equal. It is None if the repeats of a question have
    different answers, as on a GPU.
    """

    def spread(values: Sequence[float]) -> dict[str, float] | None:
        return {"median": median(values), "low": min(values), "high": max(values)} if values else None

    def answers(samples: Sequence[Sample]) -> set[tuple[str, int, tuple[int, ...]]]:
        return {(sample.video_id, sample.question, sample.answer) for sample in samples}

    def peak(samples: Sequence[Sample]) -> float | None:
        return max((sample.peak_bytes for sample in samples if sample.peak_bytes is not None), default=None)

    row: Row = {"method": result.arm.method, "retention_ratio": result.arm.retention_ratio}
    for figures, samples in ((_ONLINE, result.online), (_CACHED, result.cached)):
        for name, field in figures.items():
            row[name] = spread([value for sample in samples if (value := getattr(sample, field)) is not None])
    for name in ("visual_tokens", "prompt_tokens", "kv_bytes"):
        row[name] = median(getattr(sample, name) for sample in result.online)
    row["build_s"] = spread(result.build_s)
    online, cached = answers(result.online), answers(result.cached)
    repeatable = len(online) == len(cached) == len({question[:2] for question in online})
    seconds = [row[name]["median"] for name in ("build_s", "cached_s", "online_s")]
    return {
        **row,
        "bytes_read": median(sample.bytes_read for sample in result.cached),
        "online_peak_bytes": peak(result.online),
        "cached_peak_bytes": peak(result.cached),
        "break_even": break_even(*seconds),
        "same_answers": online == cached if repeatable else None,
    }


def break_even(build_s: float, cached_s: float, online_s: float) -> int | None:
    """Compute the number of questions from which building and asking a cache takes less time than asking videos.

    None if a cached answer is not faster.
    """
    return max(1, math.ceil(build_s / (online_s - cached_s))) if online_s > cached_s else None


def tables(rows: Sequence[Row], title: str, memory: str) -> Iterator[Table]:
    """Yield the tables to print: the paper's columns, their parts, and online beside cached.

    ``rows`` has full retention first. ``memory`` says whose memory was measured.
    """
    for number, (about, columns) in enumerate(_TABLES.items()):
        lines = []
        for row in rows:
            method = method_title(row["method"]) if row is not rows[0] else "Original"
            compares = number == 0 and row is not rows[0]
            cells = [_format_figure(name, row[name], rows[0][name] if compares else None) for name in columns.values()]
            lines.append((method, f"{100 * row['retention_ratio']:g}%", *cells))
        heads = ("method", "kept", *(head.format(memory=memory) for head in columns))
        yield figure_table(f"{title}\n{about}", heads, lines)


def _format_figure(name: str, figure: Any, full: Any) -> str:
    """Format a figure of a row in the unit of its name: "-" for None, "yes" or "NO" for a bool, a spread's median.

    The change to ``full``, the same figure at full retention, is appended for some names.
    """
    if figure is None or isinstance(figure, bool):
        return {None: "-", True: "yes", False: "NO"}[figure]
    value, before = (x["median"] if isinstance(x, dict) else x for x in (figure, full))
    unit, digits = next((unit_and_digits for end, unit_and_digits in _UNITS.items() if name.endswith(end)), (1, 0))
    change = f" {value / before - 1:+.1%}" if name in _FIGURES_WITH_CHANGE and before else ""
    return f"{value / unit:.{digits}f}{change}"


def table3(results: Sequence[ArmResult], title: str, memory: str) -> str:
    """Return the paper's Table 3 as a LaTeX tabular, which needs the package booktabs.

    Methods are grouped by retention ratio, the largest first. Brackets have the change to full retention, the first of
    ``results``. Seconds are summed over all questions. LLM time includes tower and pruning. GB and MB mean GiB and MiB.

    Args:
        title: the text of a comment above the table.
        memory: a text that says whose memory was measured, for the note below the table.
    """
    full, *results_of_methods = results
    lines = [f"% {title}", "% Needs booktabs.", r"\begin{tabular}{l cccc}", r"\toprule"]
    lines.append(_format_latex_row("\\textbf{Method}", [rf"\textbf{{{escape_latex(head)}}}" for head in _LATEX_HEADS]))
    lines += [r"\midrule", _format_latex_row(r"Original (100\%)", _format_latex_cells(full, full))]
    largest_first = sorted(results_of_methods, key=lambda result: -result.arm.retention_ratio)
    for ratio, block in groupby(largest_first, key=lambda result: result.arm.retention_ratio):
        heading = rf"Pruning Ratio ($\downarrow {100 * (1 - ratio):g}\%$)"
        lines += [r"\midrule", rf"\multicolumn{{5}}{{c}}{{\textit{{{heading}}}}} \\"]
        for result in block:
            lines.append(
                _format_latex_row(escape_latex(method_title(result.arm.method)), _format_latex_cells(result, full))
            )
    note = escape_latex(f"{len(full.online)} questions a line; memory: {memory}.")
    lines += [r"\bottomrule", rf"\multicolumn{{5}}{{p{{0.95\linewidth}}}}{{\footnotesize {note}}} \\"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _format_latex_row(title: str, cells: Sequence[str]) -> str:
    """Format a line of a LaTeX table."""
    return " & ".join([title, *cells]) + r" \\"


def _format_latex_cells(result: ArmResult, full: ArmResult) -> list[str]:
    """Format an arm's E2E seconds, LLM seconds, peak GiB and KV MiB in LaTeX, each with its change to ``full``."""

    def values(of: ArmResult) -> list[float | None]:
        peaks = [sample.peak_bytes / GIB for sample in of.online if sample.peak_bytes is not None]
        seconds = [sum(s.total_s for s in of.online), sum(s.llm_with_tower_s for s in of.online)]
        return [*seconds, max(peaks, default=None), max(sample.kv_bytes for sample in of.online) / MIB]

    cells = []
    for value, before, digits in zip(values(result), values(full), (1, 1, 2, 0), strict=True):
        change = 0.0 if value is None or not before else 100 * (value / before - 1)
        arrow = "" if result is full or value is None else f" ({'↑' if change > 0 else '↓'}{abs(change):.1f}%)"
        cells.append("--" if value is None else escape_latex(f"{value:.{digits}f}{arrow}"))
    return cells
