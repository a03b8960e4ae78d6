"""Measure the paper's efficiency figures: E2E and LLM seconds, peak memory, KV cache, tokens a second.

The same questions are asked of a cache of the videos' tokens, too.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from jobs.benchmark.machine import machine, machine_line
from jobs.benchmark.shown import say
from jobs.command import count, file_in_folder, seldom, share
from jobs.frame.json_document import Done, add_json
from pipeline.options import ATTN, DEVICES, DTYPES

if TYPE_CHECKING:
    from jobs.benchmark.efficiency.setup import Job

HELP = "end-to-end and model seconds, memory and tokens a second of each method, from videos and from a cache"
METHODS = ("fastv", "fastvid", "cdpruner", "vidcom2", "gstep")  # methods of the paper's Table 3, in its order
_EVERY_S = 5.0  # seconds between two lines of progress


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
    add_json(parser)
    parser.add_argument("--latex", type=file_in_folder, metavar="FILE", help="write the paper's Table 3 there")


def run(arguments: argparse.Namespace) -> Done:
    """Run the benchmark, and write the paper's table where asked."""
    from jobs.benchmark.efficiency.latex import table3  # noqa: PLC0415 - torch loads after the flags
    from jobs.benchmark.efficiency.report import as_record, summarise, tables  # noqa: PLC0415
    from jobs.benchmark.efficiency.setup import prepare  # noqa: PLC0415
    from jobs.benchmark.efficiency.times import Bench  # noqa: PLC0415

    with TemporaryDirectory() as folder:
        flags = {name: value for name, value in vars(arguments).items() if name not in ("run", "json", "latex")}
        job = prepare(Path(folder), methods=flags.pop("method"), ratios=flags.pop("retention_ratio"), **flags)
        with closing(Bench(job, Path(folder), seldom(say, _EVERY_S))) as bench:
            found = bench.run()
    rows = [summarise(one) for one in found]
    title = _title(job, arguments, rows[0].figures["visual_tokens"].median)
    memory = "GPU GiB" if job.runtime.device != "cpu" else "weights + growth of RSS GiB"
    if arguments.latex is not None:
        arguments.latex.write_text(table3(found, title, memory), encoding="utf-8")
    runtime = {"machine": machine(job.runtime.device), "runtime": job.runtime.describe(), "random_weights": job.random}
    record = {"title": title, "memory": memory, **runtime, "arguments": flags, **as_record(rows, found)}
    return Done(0, record, tables(rows, title, memory))


def _title(job: Job, arguments: argparse.Namespace, visual_tokens: float) -> str:
    """Describe model, machine and workload in one line for the tables' title."""
    runtime = job.runtime
    model = f"{job.request.source.name}{' with random weights' if job.random else ''}"
    where = f"{machine_line(runtime.device)}, {runtime.dtype_name}, attention {runtime.attn_implementation}"
    what = f"{arguments.num_frames} frames, {visual_tokens:.0f} visual tokens, {arguments.max_new_tokens} new tokens"
    return f"{model} on {where}; {what}; {len(job.videos)} videos x {job.questions} questions x {job.repeats} repeats"
