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

from jobs.benchmark.efficiency_bench import Bench, Found, Job, Sample, prepare
from jobs.benchmark.shared import figure_table, machine, machine_line, say
from jobs.command import count, file_in_folder, seldom, share
from jobs.frame.json_document import Done
from pipeline.options import ATTN, DEVICES, DTYPES
from pipeline.rows import JsonObject

METHODS = ("fastv", "fastvid", "cdpruner", "vidcom2", "gstep")  # methods of the paper's Table 3, in its order
MIB, GIB = 2**20, 2**30
_EVERY_S = 5.0  # seconds between two lines of progress
#: Figures of a row -> the field of samples from the video that it is the median of, with its range. ``online_s`` is the
#: paper's E2E, from the video to the answer. ``llm_with_tower_s`` are encoding, pruning and the whole ``generate``, as
#: the paper counts; ``llm_s`` is that without the vision tower and without pruning before the prompt.
_ONLINE = {
    **{name: name for name in ("video_decode_s", "encode_s", "prune_s", "prompt_s", "prefill_s", "token_decode_s")},
    **{name: name for name in ("llm_s", "llm_with_tower_s", "prefill_rate", "decode_rate")},
    "online_s": "total_s",
}
_CACHED = {"read_s": "read_s", "cached_llm_s": "llm_s", "cached_s": "total_s"}  # likewise of samples from the cache
#: The printed tables: a line about it, whether the change to full retention is shown, and its columns: title, figure,
#: unit, digits. {memory} is what the peak was measured of.
_TABLES = (
    (
        "online, medians of a question; in % the change to full retention",
        True,
        (
            ("visual tokens", "visual_tokens", 1, 0),
            ("E2E s", "online_s", 1, 3),
            ("LLM s with tower", "llm_with_tower_s", 1, 3),
            ("LLM s without tower", "llm_s", 1, 3),
            ("{memory}", "online_peak_bytes", GIB, 2),
            ("KV MiB", "kv_bytes", MIB, 1),
        ),
    ),
    (
        "parts of it; tokens/s of the prompt, and of the answer after its first token",
        False,
        (
            ("read video s", "video_decode_s", 1, 3),
            ("encode s", "encode_s", 1, 3),
            ("prune s", "prune_s", 1, 3),
            ("prompt s", "prompt_s", 1, 3),
            ("prefill s", "prefill_s", 1, 3),
            ("prefill tokens/s", "prefill_rate", 1, 0),
            ("decode s", "token_decode_s", 1, 3),
            ("decode tokens/s", "decode_rate", 1, 1),
        ),
    ),
    (
        "from a cache of its tokens (no vision tower in memory), seconds to cache a video,\n"
        "and from how many questions about a video on caching takes less time",
        False,
        (
            ("online s", "online_s", 1, 3),
            ("cached s", "cached_s", 1, 3),
            ("of it read s", "read_s", 1, 3),
            ("of it LLM s", "cached_llm_s", 1, 3),
            ("read MB", "bytes_read", 10**6, 2),
            ("{memory}", "cached_peak_bytes", GIB, 2),
            ("build s", "build_s", 1, 3),
            ("break-even", "break_even", 1, 0),
            ("same answers", "same_answers", 1, 0),
        ),
    ),
)
_TITLES = {"fastv": "FastV", "fastvid": "FastVID", "cdpruner": "CDPruner", "visionzip": "VisionZip"}
_TITLES |= {"vidcom2": "VidCom2", "gstep": "GSTEP"}
_LATEX_HEADS = ("E2E (s)↓", "LLM Time (s)↓", "GPU (GB)↓", "KV (MB)↓")
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "↓": r"$\downarrow$",
        "↑": r"$\uparrow$",
        **{sign: "\\" + sign for sign in "&%$#_{}"},
    }
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--model",
        default="tiny-qwen2-5-vl",
        metavar="MODEL",
        help="a Hugging Face id or folder; of a folder with a config.json and no weights they are random "
        "[tiny-qwen2-5-vl, random and small: its figures say how methods compare, not how fast a real model is]",
    )
    parser.add_argument(
        "--random-weights", action="store_true", help="read no weights: seeded random ones, made on the device"
    )
    parser.add_argument("--siglip", metavar="MODEL", help="for fastvid and cdpruner on LLaVA-OneVision")
    parser.add_argument(
        "--method",
        nargs="+",
        default=list(METHODS),
        metavar="METHOD",
        help=f"parameters behind commas, fastv,K=3; full retention is always there, first [{' '.join(METHODS)}]",
    )
    parser.add_argument(
        "--retention-ratio", type=share, nargs="+", default=[0.25, 0.15], metavar="R", help="[0.25 0.15, the paper's]"
    )
    parser.add_argument("--videos", default="sample", metavar="VIDEOS", help="as of jobs.prune [sample]")
    parser.add_argument("--num-frames", type=count, default=32, metavar="T", help="frames a video [32]")
    parser.add_argument("--questions", type=count, default=1, metavar="Q", help="a video [1]")
    parser.add_argument("--max-new-tokens", type=count, default=16, metavar="N", help="of every answer, exactly [16]")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="[auto]")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: bfloat16 on GPUs, else float32 [auto]")
    parser.add_argument("--attn", default="auto", choices=ATTN, help="attention kernel [auto]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="times each; medians are shown [3]")
    parser.add_argument("--latex", type=file_in_folder, metavar="FILE", help="write the paper's Table 3 there")


def run(arguments: argparse.Namespace) -> Done:
    """Run the benchmark, and write the paper's table where asked. Raises RunFailed, UsageError."""
    with TemporaryDirectory() as folder:
        job = prepare(Path(folder), arguments)
        with closing(Bench(job, Path(folder), seldom(say, _EVERY_S))) as bench:
            found = bench.run()
    rows = [summarise(one) for one in found]
    title = _title(job, arguments, rows[0]["visual_tokens"])
    memory = "GPU GiB" if job.runtime.device != "cpu" else "process's GiB"
    if arguments.latex is not None:
        arguments.latex.write_text(table3(found, title, memory), encoding="utf-8")
    flags = {name: value for name, value in vars(arguments).items() if name not in ("run", "json", "latex")}
    samples = [
        {
            "method": one.arm.method,
            "retention_ratio": one.arm.retention_ratio,
            **asdict(sample),
            "total_s": sample.total_s,
        }
        for one in found
        for sample in (*one.online, *one.cached)
    ]
    about = {"machine": machine(job.runtime.device), "runtime": job.runtime.describe(), "random_weights": job.random}
    record = {"title": title, "memory": memory, **about, "arguments": flags, "rows": rows, "samples": samples}
    return Done(0, record, list(tables(rows, title, memory)))


def _title(job: Job, arguments: argparse.Namespace, visual_tokens: float) -> str:
    """Describe model, machine and workload in one line for the tables' title."""
    runtime, n_videos = job.runtime, job.request.manifest.num_rows
    model = f"{job.request.source.name}{' with random weights' if job.random else ''}"
    where = f"{machine_line(runtime.device)}, {runtime.dtype_name}, attention {runtime.attn_implementation}"
    what = f"{arguments.num_frames} frames, {visual_tokens:.0f} visual tokens, {arguments.max_new_tokens} new tokens"
    return f"{model} on {where}; {what}; {n_videos} videos x {job.questions} questions x {job.repeats} repeats"


def summarise(found: Found) -> JsonObject:
    """Return an arm's row: medians with their range, peaks, and from how many questions on a cache pays."""

    def spread(values: Sequence[float]) -> dict[str, float] | None:
        return {"median": median(values), "low": min(values), "high": max(values)} if values else None

    def answers(samples: Sequence[Sample]) -> dict[tuple[str, int, int], tuple[int, ...]]:
        return {(sample.video_id, sample.question, sample.repeat): sample.answer for sample in samples}

    def peak(samples: Sequence[Sample]) -> float | None:
        return max((sample.peak_bytes for sample in samples if sample.peak_bytes is not None), default=None)

    row: JsonObject = {"method": found.arm.method, "retention_ratio": found.arm.retention_ratio}
    for figures, samples in ((_ONLINE, found.online), (_CACHED, found.cached)):
        for name, field in figures.items():
            row[name] = spread([value for one in samples if (value := getattr(one, field)) is not None])
    for name in ("visual_tokens", "prompt_tokens", "kv_bytes"):
        row[name] = median(getattr(one, name) for one in found.online)
    build = row["build_s"] = spread(found.build_s)
    return {
        **row,
        "bytes_read": median(one.bytes_read for one in found.cached),
        "online_peak_bytes": peak(found.online),
        "cached_peak_bytes": peak(found.cached),
        "break_even": break_even(*(one["median"] for one in (build, row["cached_s"], row["online_s"]))),
        "same_answers": answers(found.online) == answers(found.cached),
    }


def break_even(build_s: float, cached_s: float, online_s: float) -> int | None:
    """Return the number of questions from which building a cache and asking it takes less time than asking videos.

    None where there is none.
    """
    return max(1, math.ceil(build_s / (online_s - cached_s))) if online_s > cached_s else None


def tables(rows: Sequence[JsonObject], title: str, memory: str) -> Iterator[Table]:
    """Yield the tables to print: the paper's columns, their parts, and online beside cached."""
    for about, compares, columns in _TABLES:
        lines = []
        for row in rows:
            method = method_title(row["method"]) if row is not rows[0] else "Original"
            cells = [_shown(row, rows[0] if compares else row, *column) for _, *column in columns]
            lines.append((method, f"{100 * row['retention_ratio']:g}%", *cells))
        heads = ("method", "kept", *(head.format(memory=memory) for head, *_ in columns))
        yield figure_table(f"{title}\n{about}", heads, lines)


def _shown(row: JsonObject, full: JsonObject, name: str, unit: float, digits: int) -> str:
    """Format a figure of a row, with the change to full retention unless that is the row itself; "-" for None."""

    def value_of(of: JsonObject) -> Any:
        return of[name]["median"] if isinstance(of[name], dict) else of[name]

    value, before = value_of(row), value_of(full)
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "NO"}[value]
    change = "" if row is full or not before or name == "visual_tokens" else f" {value / before - 1:+.1%}"
    return f"{value / unit:.{digits}f}{change}"


def method_title(method: str) -> str:
    """Return a method as the paper writes it: "fastv,K=3" is "FastV, K=3"; unknown names stay."""
    name, *parameters = method.split(",")
    return ", ".join([_TITLES.get(name, name), *parameters])


def table3(found: Sequence[Found], title: str, memory: str) -> str:
    """Return the paper's Table 3 in LaTeX; seconds are summed over all questions, LLM time with tower and pruning.

    GiB and MiB are what the paper calls GB and MB. In brackets is the change to full retention, which is the first of
    ``found``. It needs the package booktabs.
    """
    full, *others = found
    lines = [f"% {title}", "% Needs booktabs.", r"\begin{tabular}{l cccc}", r"\toprule"]
    lines.append(_latex_row("\\textbf{Method}", [rf"\textbf{{{head.translate(_LATEX)}}}" for head in _LATEX_HEADS]))
    lines += [r"\midrule", _latex_row(r"Original (100\%)", _latex_cells(full, full))]
    largest_first = sorted(others, key=lambda one: -one.arm.retention_ratio)
    for ratio, block in groupby(largest_first, key=lambda one: one.arm.retention_ratio):
        pruned = rf"Pruning Ratio ($\downarrow {100 * (1 - ratio):g}\%$)"
        lines += [r"\midrule", rf"\multicolumn{{5}}{{c}}{{\textit{{{pruned}}}}} \\"]
        for one in block:
            name = method_title(one.arm.method).translate(_LATEX)
            lines.append(_latex_row(r"\textbf{GSTEP (Ours)}" if name == "GSTEP" else name, _latex_cells(one, full)))
    note = f"{len(full.online)} questions a line; memory: {memory}.".translate(_LATEX)
    lines += [r"\bottomrule", rf"\multicolumn{{5}}{{p{{0.95\linewidth}}}}{{\footnotesize {note}}} \\"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _latex_row(title: str, cells: Sequence[str]) -> str:
    """Return a line of a LaTeX table."""
    return " & ".join([title, *cells]) + r" \\"


def _latex_cells(one: Found, full: Found) -> list[str]:
    """Return an arm's E2E seconds, LLM seconds, peak GiB and KV MiB in LaTeX, each with its change to ``full``."""

    def values(of: Found) -> list[float | None]:
        peaks = [sample.peak_bytes / GIB for sample in of.online if sample.peak_bytes is not None]
        seconds = [sum(s.total_s for s in of.online), sum(s.llm_with_tower_s for s in of.online)]
        return [*seconds, max(peaks, default=None), max(sample.kv_bytes for sample in of.online) / MIB]

    cells = []
    for value, before, digits in zip(values(one), values(full), (1, 1, 2, 0), strict=True):
        change = 0.0 if value is None or not before else 100 * (value / before - 1)
        arrow = "" if one is full or value is None else f" ({'↑' if change > 0 else '↓'}{abs(change):.1f}%)"
        cells.append("--" if value is None else f"{value:.{digits}f}{arrow}".translate(_LATEX))
    return cells
