"""Which seeds are for what: training, development and test never share a video.

Methods and models are tuned on development videos. Those of the test are looked at once a result that is published:
they are made only where the name of their split is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pipeline.errors import UsageError

SplitName = Literal["train", "development", "test"]
TRAIN = range(1_000_000, 5_000_000)
DEVELOPMENT = range(7_000_000, 8_000_000)
TEST = range(9_000_000, 10_000_000)
SEEDS: Mapping[SplitName, range] = {"train": TRAIN, "development": DEVELOPMENT, "test": TEST}
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)
#: Videos of one benchmark at most; benchmarks of other seeds have others.
BLOCK = 10_000


def check_seed(seed: int, split: SplitName) -> None:
    """Raise ValueError if a seed does not belong to the named split."""
    if seed not in SEEDS[split]:
        home = next((name for name, seeds in SEEDS.items() if seed in seeds), None)
        of = f"is of the {home} videos" if home else "is of no split"
        first, last = SEEDS[split][0], SEEDS[split][-1]
        raise ValueError(f"seed {seed} {of}; those of split={split!r} are {first} to {last}")


def benchmark_seeds(split: SplitName, seed: int, n_videos: int) -> range:
    """Return the seeds of a benchmark's videos; no two benchmarks share one. Raise UsageError for odd numbers."""
    blocks = len(SEEDS[split]) // BLOCK
    if not 0 <= seed < blocks:
        raise UsageError(f"--seed must be 0 to {blocks - 1} on the split {split}, got {seed}")
    if not 1 <= n_videos <= BLOCK:
        raise UsageError(f"--videos must be 1 to {BLOCK}, got {n_videos}; take another --seed for more")
    first = SEEDS[split][seed * BLOCK]
    return range(first, first + n_videos)
