"""A stage of training: steps that follow from their number alone, so that a stopped one goes on exactly."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

_EVERY = 25  # steps of a line of the log
_SAVE_EVERY_S = 60.0
_CLIP = 1.0  # norm of the gradient


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps and their learning rate, which rises at first and falls at the end.

    Attributes:
        steps: how many.
        rate: the highest.
        warmup: steps until it is reached.
        decay: share of the steps over which it falls to a twentieth.
    """

    steps: int
    rate: float
    warmup: int = 50
    decay: float = 0.5

    def rate_at(self, step: int) -> float:
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.rate * min(1.0, (step + 1) / self.warmup) * min(1.0, max(0.05, left))


class Meter:
    """Means of what steps report, each weighed by how much it is about."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """A sum over ``count`` things."""
        old, seen = self._sums[name]
        self._sums[name] = (old + total, seen + count)

    def means(self) -> dict[str, float]:
        return {name: round(total / count, 4) for name, (total, count) in self._sums.items() if count}


#: Takes the step's number, its generator and a meter to report to; returns the loss.
Step = Callable[[int, np.random.Generator, Meter], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where a stage is kept, and how it is run.

    Attributes:
        folder: gets ``NAME.pt``, what to go on from, and ``NAME.jsonl``, a line every 25 steps.
        name: of the stage.
        seed: of the training.
        schedule: its steps.
        say: told each line of the log.
    """

    folder: Path
    name: str
    seed: int
    schedule: Schedule
    say: Callable[[str], None]

    @property
    def state(self) -> Path:
        return self.folder / f"{self.name}.pt"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def run(self, module: nn.Module, step_of: Step, start: Mapping[str, Tensor] | None = None) -> None:
        """Train a module, from where an earlier run of this stage stopped.

        Args:
            module: with the weights that a first step begins from.
            step_of: the loss of a step.
            start: weights to begin from instead.
        """
        if start is not None:
            module.load_state_dict(start)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.schedule.rate, betas=(0.9, 0.98), weight_decay=0.0)
        done = self._resume(module, optimizer)
        module.train()
        meter, saved, began = Meter(), time.monotonic(), time.monotonic()
        for step in range(done, self.schedule.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.rate_at(step)
            name = [ord(letter) for letter in self.name]
            torch.manual_seed(int(np.random.default_rng([self.seed, *name, step, 1]).integers(2**62)))
            loss = step_of(step, np.random.default_rng([self.seed, *name, step]), meter)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, _CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % _EVERY == 0 or step + 1 == self.schedule.steps:
                self._write({"step": step + 1, "seconds": round(time.monotonic() - began, 1), **meter.means()})
                meter = Meter()
                # Only here, so that a stage that goes on reports what it would have.
                if time.monotonic() - saved > _SAVE_EVERY_S or step + 1 == self.schedule.steps:
                    self._save(module, optimizer, step + 1)
                    saved = time.monotonic()
        module.eval()

    def _write(self, line: Mapping[str, float]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        self.say(f"{self.name} " + " ".join(f"{name} {value:g}" for name, value in line.items()))

    def _save(self, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        scratch = self.state.with_suffix(".part")
        torch.save({"step": step, "module": module.state_dict(), "optimizer": optimizer.state_dict()}, scratch)
        scratch.replace(self.state)

    def _resume(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        if not self.state.is_file():
            self.log.unlink(missing_ok=True)
            return 0
        held = torch.load(self.state, weights_only=True)
        module.load_state_dict(held["module"])
        optimizer.load_state_dict(held["optimizer"])
        step = int(held["step"])
        # Lines of steps that are taken again.
        lines = [line for line in self.log.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
        self.log.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return step
