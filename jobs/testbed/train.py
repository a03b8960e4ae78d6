"""Train the model `shapes` from nothing, in some two hours on two cores. The same command goes on where it stopped."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from jobs.command import count
from pipeline.errors import UsageError

HELP = "train the model `shapes`"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what it makes: states, logs, curves.png, checkpoint/")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of weights, order and noise [0]")
    parser.add_argument("--vision", type=count, default=2500, metavar="N", help="steps of the vision half [2500]")
    parser.add_argument("--reading", type=count, default=2600, metavar="N", help="steps of the language half [2600]")
    parser.add_argument("--videos", type=count, default=800, metavar="N", help="real videos of each length [800]")
    parser.add_argument(
        "--sight", type=count, default=2000, metavar="N", help="steps of the language half on those videos [2000]"
    )
    parser.add_argument(
        "--held-out", type=count, default=40, metavar="N", help="videos of each length and hardness for the card [40]"
    )
    parser.add_argument(
        "--processes", type=int, choices=(1, 2), default=2, help="2: both halves at the same time, a thread each [2]"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train; returns the exit code."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "the curves need matplotlib: pip install matplotlib, or this package with its extra `benchmark`"
        )
    from jobs.testbed.training.train import TrainingRecipe, train  # noqa: PLC0415 - loads torch and transformers

    names = asdict(TrainingRecipe())
    recipe = TrainingRecipe(**{name: getattr(arguments, name) for name in names})

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    checkpoint = train(arguments.folder, recipe, say, processes=arguments.processes)
    Console().print(f"the model is in {checkpoint}", markup=False, highlight=False, soft_wrap=True)
    return 0
