"""Train the model `shapes` from nothing, in some two hours on two cores. The same command goes on where it stopped."""

from __future__ import annotations

import argparse
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from jobs.command import count
from jobs.testbed.training.recipe import TrainingRecipe
from pipeline.errors import UsageError

HELP = "train the model `shapes`"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="what it makes: states, logs, curves.png, checkpoint/")
    for one in fields(TrainingRecipe):
        kind = int if one.name == "seed" else count
        flag = f"--{one.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=one.default, metavar="N", help=one.metadata["help"])
    parser.add_argument(
        "--processes", type=int, choices=(1, 2), default=2, help="2: both halves at the same time, a thread each [2]"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train; returns the exit code."""
    if find_spec("matplotlib") is None:
        raise UsageError("the curves need matplotlib: pip install matplotlib")
    from jobs.testbed.training.train import train  # noqa: PLC0415 - loads torch and transformers

    recipe = TrainingRecipe(**{one.name: getattr(arguments, one.name) for one in fields(TrainingRecipe)})

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    checkpoint = train(arguments.folder, recipe, say, processes=arguments.processes)
    Console().print(f"the model is in {checkpoint}", markup=False, highlight=False, soft_wrap=True)
    return 0
