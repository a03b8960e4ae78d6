"""Show what answers to made-up videos rest on: what is lost without the tokens that show the answer, what each method
keeps of them, and which questions that costs.

Methods are asked as python -m jobs.evaluate asks them, in one process. FastV, which prunes inside the language model,
is in the tables by type of question alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from jobs.command import count, share
from jobs.testbed.progress import video_progress
from pipeline.errors import UsageError

HELP = "what answers rest on: knock-outs, what methods keep of the evidence, and where they lose"
_RATIOS = (0.25, 0.20, 0.15, 0.10)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of python -m jobs.testbed make")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="OUT", help="the folder that study.md and study.json are written to"
    )
    parser.add_argument(
        "--model", default="shapes", help="a LLaVA-OneVision: shapes, tiny, a folder or a Hugging Face id [shapes]"
    )
    parser.add_argument(
        "--method",
        nargs="+",
        default=(),
        metavar="METHOD",
        help="as for jobs.evaluate, parameters behind commas [all that the model can run]",
    )
    parser.add_argument(
        "--retention-ratio",
        nargs="+",
        type=share,
        default=_RATIOS,
        metavar="R",
        help=f"shares of the visual tokens to keep [{' '.join(map(str, _RATIOS))}]",
    )
    parser.add_argument("--videos", type=count, metavar="N", help="only the first so many [all]")
    parser.add_argument(
        "--positions",
        choices=("contiguous", "original"),
        help="of what methods keep; knock-outs keep the original ones [the model's default]",
    )
    parser.add_argument(
        "--least",
        type=_part,
        default=0.15,
        metavar="SHARE",
        help="of its cell that a thing must cover more than, for the cell's token to show it [0.15; 0: any]",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of random tokens [0]")


def _part(text: str) -> float:
    """A flag's type: a number in [0, 1)."""
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {value}")
    return value


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Ask, count and write; returns the exit code."""
    if arguments.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {arguments.seed}")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise UsageError(f"--out {arguments.out} is a file: name a folder")
    from jobs.testbed.studying.cases import read_films, read_recipe  # noqa: PLC0415 - torch, and seconds

    films, recipe = read_films(arguments.folder, arguments.videos), read_recipe(arguments.folder)
    from gstep.backbones import ModelSource  # noqa: PLC0415
    from gstep.language import prompt_builder  # noqa: PLC0415
    from jobs.testbed.studying.measure import measure  # noqa: PLC0415
    from jobs.testbed.studying.methods import prunings_of  # noqa: PLC0415
    from jobs.testbed.studying.reading import Reader, check_family  # noqa: PLC0415
    from jobs.testbed.studying.record import record_of  # noqa: PLC0415
    from jobs.testbed.studying.tables import markdown  # noqa: PLC0415
    from pipeline.execution.request import refusing  # noqa: PLC0415

    with refusing():
        source = ModelSource.resolve(arguments.model)
        check_family(source)
        builder = prompt_builder(source, arguments.positions)
        prunings = prunings_of(source, builder, arguments.method, arguments.retention_ratio, arguments.seed)
        evidence = {column: late.pruner.sources[name] for late in prunings.values() for name, column in late.evidence}
        reader = Reader(source, evidence)
    arguments.out.mkdir(parents=True, exist_ok=True)
    progress = video_progress(console, len(films))
    positions = builder.policy.positions
    findings = measure(
        films, reader, prunings, positions=positions, seed=arguments.seed, least=arguments.least, progress=progress
    )
    about = {
        "model": source.identity,
        "recipe": recipe,
        "videos": len(films),
        "questions": sum(len(film.cases) for film in films),
        "positions": positions,
        "seed": arguments.seed,
        "least": arguments.least,
    }
    record = record_of(findings, about)
    text = markdown(record)
    (arguments.out / "study.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (arguments.out / "study.md").write_text(text, encoding="utf-8")
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0
