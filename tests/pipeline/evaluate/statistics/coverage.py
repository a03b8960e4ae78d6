"""How often intervals hold the true difference, and how often p is below 0.05 where there is none, by simulation.

``python -m tests.pipeline.evaluate.statistics.coverage`` prints the table of ``pipeline/evaluate/README.md``. A study
is two methods' answers to questions about G videos; questions about a video are alike, by a beta distribution.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.statistics.bootstrap import draw_counts, estimate, interval

CLUSTERS = (4, 5, 6, 10, 20, 100)
#: Questions a video, shares of them that only the method and only full retention get right.
WORLDS = (
    ("3 a video, 15 % to either side", (3, 3), (0.15, 0.15)),
    ("1 to 12 a video, 15 % to either side", (1, 12), (0.15, 0.15)),
    ("1 to 12 a video, 5 % up, 20 % down", (1, 12), (0.05, 0.20)),
    ("1 to 12 a video, 2 % up, 6 % down", (1, 12), (0.02, 0.06)),
)
_ALIKE = 4.0  # of the beta distribution: the smaller, the more questions about one video are alike


def studies(
    world: tuple[tuple[int, int], tuple[float, float]], n_clusters: int, n: int, generator: np.random.Generator
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Yield the scores [2, Q] of both methods in each study, full retention first, and the video of each question."""
    (fewest, most), shares = world
    weights = _ALIKE * np.array([*shares, 1 - sum(shares)])
    for _ in range(n):
        video = np.repeat(np.arange(n_clusters), generator.integers(fewest, most + 1, n_clusters))
        chances = generator.dirichlet(weights, n_clusters)[video]
        drawn = generator.random(len(video))
        up, down = drawn < chances[:, 0], drawn > 1 - chances[:, 1]
        right = generator.random(len(video)) < 0.6
        yield np.stack([(right & ~up) | down, (right & ~down) | up]).astype(float), video


def held(world: tuple[tuple[int, int], tuple[float, float]], n_clusters: int, n: int, seed: int) -> tuple[float, ...]:
    """Return shares of studies.

    They are: percentile intervals that hold the true difference; those without an interval; of the others, intervals
    that hold it; p below 0.05 among all.
    """
    generator = np.random.default_rng([seed, n_clusters])
    truth = world[1][0] - world[1][1]
    by_percentiles, shown, holds, found = [], [], [], []
    for scores, video in studies(world, n_clusters, n, generator):
        one = estimate(scores, video, np.zeros(len(video), np.int64), draw_counts(n_clusters, 1000, generator))
        low, high = interval(one.drawn[:, 1] - one.drawn[:, 0])
        by_percentiles.append(low <= truth <= high)
        difference = one.difference(1, 0)
        shown.append(not math.isnan(difference.low))
        if shown[-1]:
            holds.append(difference.low <= truth <= difference.high)
        found.append(difference.p < 0.05)
    return (
        float(np.mean(by_percentiles)),
        1 - float(np.mean(shown)),
        float(np.mean(holds or math.nan)),
        float(np.mean(found)),
    )


def main(n: int = 2000) -> None:
    """Print the table."""
    print("| questions that change | videos | percentiles hold | no interval | intervals hold | p < 0.05 |")
    print("|---|" + "---:|" * 5)
    for number, (title, *world) in enumerate(WORLDS):
        for n_clusters in CLUSTERS:
            shares = held((world[0], world[1]), n_clusters, n, number)
            null = world[1][0] == world[1][1]
            cells = [*(f"{100 * share:.1f} %" for share in shares[:3]), f"{100 * shares[3]:.1f} %" if null else ""]
            print(f"| {title} | {n_clusters} | {' | '.join(cells).replace('nan %', '–')} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
