"""A brute-force float64 numpy reading of Eqs. (9)-(12), and tokens on which arithmetic is exact."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def all_distances(tokens: Array) -> Array:
    """Return 1 - cosine of all pairs, 0 below 2e-6; a zero token has cosine 0."""
    norm = np.linalg.norm(tokens, axis=1)
    products = np.outer(norm, norm)
    distance = 1 - np.divide(tokens @ tokens.T, products, out=np.zeros_like(products), where=products > 0)
    return np.where(distance < 2e-6, 0.0, distance)


def oracle_start(start: str, distance: Array, rho: Array) -> int:
    if start == "isolated":
        return int(np.argmax((distance + np.diag(np.full(len(distance), np.inf))).min(axis=1)))
    return 0 if start == "first" else int(np.argmax(rho))


def oracle(
    tokens: Array, rho: Array, budget: int, alpha: float = 0.5, beta: float = 1e-6, start: str = "density"
) -> tuple[list[int], int]:
    """Return the picks, and how many come before the first whose score leads by less than 1e-5.

    Its logarithm, which CPUs round differently, decides nothing on ``exact_tokens``: there scores are equal where their
    arguments are, up to their order, and differ by far more than rounding elsewhere.
    """
    distance = all_distances(tokens)
    picked, clear = [oracle_start(start, distance, rho)], budget
    while len(picked) < budget:
        nearest = distance[:, picked].min(axis=1)
        score = alpha * np.log(nearest + beta) + (1 - alpha) * np.log(rho + beta)
        score[picked] = -np.inf
        runner_up = np.sort(score)[-2] if len(score) - len(picked) > 1 else -np.inf
        if score.max() - runner_up < 1e-5:
            clear = min(clear, len(picked))
        picked.append(int(np.argmax(score)))
    return picked, clear


def exact_tokens(n_tokens: int, seed: int) -> Array:
    """Draw tokens of 4 entries of +-1, some repeated: of norm 2, so that every cosine is an exact multiple of 1/4."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((n_tokens, 12))
    for token in tokens:
        token[rng.permutation(12)[:4]] = rng.choice([-1.0, 1.0], 4)
    return tokens[rng.integers(0, n_tokens, n_tokens)]
