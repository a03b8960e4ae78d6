"""The whole training: both halves apart, at the same time, then the language half on what the vision half says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from jobs.testbed.training import language, vision
from jobs.testbed.training.card import Score, card, scores_of
from jobs.testbed.training.checkpoint import write_checkpoint
from jobs.testbed.training.corpus import Corpus, held_out, ideal_source
from jobs.testbed.training.curves import write_curves
from jobs.testbed.training.decoder import Decoder
from jobs.testbed.training.network import Eyes
from jobs.testbed.training.recipe import TrainingRecipe
from jobs.testbed.training.stage import Schedule, Stage
from pipeline.errors import UsageError
from pipeline.evaluate.shapes.hardness import HARDNESS, TRAINED_ON
from pipeline.evaluate.shapes.seeds import SEEDS

CHECKPOINT, CURVES, RECIPE = "checkpoint", "curves.png", "recipe.json"
_HELD_OUT = SEEDS["development"].start + 900_000  # no benchmark of less than ninety others has these


#: Of each stage; its steps are the recipe's.
_SCHEDULES = {
    "vision": Schedule(steps=0, rate=1.5e-3, warmup=60, decay=0.5),
    "reading": Schedule(steps=0, rate=1.5e-3, warmup=100, decay=0.5),
    "sight": Schedule(steps=0, rate=8e-4, warmup=30, decay=0.8),
}


def train(folder: Path, recipe: TrainingRecipe, say: Callable[[str], None], *, processes: int = 2) -> Path:
    """Train a model in a folder of its own; what is there already is not done again.

    Args:
        folder: gets each stage's state and log, ``curves.png``, and the checkpoint.
        say: told of the progress.
        processes: 2: both halves at the same time.

    Returns the folder of the checkpoint. Raises UsageError for a folder with another recipe.
    """
    _claim(folder, recipe)
    torch.set_num_threads(1)
    if processes == 2:  # what they made is read below
        halves = (_train_vision, _train_reading)
        with ProcessPoolExecutor(len(halves), mp_context=get_context("spawn")) as pool:
            for future in [pool.submit(_alone, half, folder, recipe) for half in halves]:
                future.result()
    eyes = _train_vision(folder, recipe, say)
    start = _train_reading(folder, recipe, say)
    corpus = Corpus(folder / "tokens", eyes, recipe.videos, say)
    decoder = Decoder()
    language.train(_stage(folder, recipe, "sight", say), decoder, corpus, language.SIGHT, noise=0.05, start=start)
    checkpoint = folder / CHECKPOINT
    write_checkpoint(checkpoint, eyes, decoder.state_dict())
    scores = _scores(eyes, decoder, recipe)
    (checkpoint / "README.md").write_text(card(checkpoint, asdict(recipe), scores), encoding="utf-8")
    write_curves(folder / CURVES, {stage: folder / f"{stage}.jsonl" for stage in _SCHEDULES})
    return checkpoint


def _train_vision(folder: Path, recipe: TrainingRecipe, say: Callable[[str], None]) -> Eyes:
    return vision.train(_stage(folder, recipe, "vision", say))


def _train_reading(folder: Path, recipe: TrainingRecipe, say: Callable[[str], None]) -> dict[str, Tensor]:
    torch.manual_seed(recipe.seed)
    decoder = Decoder()
    stage = _stage(folder, recipe, "reading", say)
    language.train(stage, decoder, ideal_source, language.READING, noise=0.08)
    return decoder.state_dict()


def _alone(
    half: Callable[[Path, TrainingRecipe, Callable[[str], None]], object], folder: Path, recipe: TrainingRecipe
) -> None:
    """In a process of its own; what it made is in the folder."""
    torch.set_num_threads(1)
    half(folder, recipe, _print)


def _print(line: str) -> None:
    print(line, flush=True)


def _stage(folder: Path, recipe: TrainingRecipe, name: str, say: Callable[[str], None]) -> Stage:
    schedule = replace(_SCHEDULES[name], steps=getattr(recipe, name))
    return Stage(folder=folder, name=name, seed=recipe.seed, schedule=schedule, say=say)


def _scores(eyes: Eyes, decoder: Decoder, recipe: TrainingRecipe) -> Sequence[Score]:
    scores: list[Score] = []
    for name in TRAINED_ON:
        videos = held_out(eyes, "development", _HELD_OUT, recipe.held_out, HARDNESS[name])
        scores += scores_of(name, language.questions_right(decoder, videos))
    return scores


def _claim(folder: Path, recipe: TrainingRecipe) -> None:
    path, record = folder / RECIPE, asdict(recipe)
    if path.is_file():
        held = json.loads(path.read_text(encoding="utf-8"))
        if held != record:
            odd = ", ".join(
                f"{key} {held.get(key)} instead of {record[key]}" for key in record if held.get(key) != record[key]
            )
            raise UsageError(f"{folder} holds a training with {odd}: name another folder, or give the same flags")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty and holds no training ({RECIPE}): name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
