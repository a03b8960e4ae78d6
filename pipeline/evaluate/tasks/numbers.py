"""Finds out how a task's number follows from its documents, so that it can have an interval.

If a task's number is a mean of numbers of single documents, whole videos can be resampled. No task says whether this is
so. It is therefore tested: results of different replies to the same document are mixed at random, the task aggregates
each mixture, and an explanation is accepted only if it reproduces the task's number for every mixture.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: The metric that is the plain mean over all documents.
QUESTIONS = "questions"
MAX_PARTS = 30  # largest number of parts that a task may average over
_TOLERANCE = 6e-5  # absolute error of a share: tasks round percentages to two decimals
_FEWEST_MIXTURES = 24
_MOST_ATTEMPTS = 2  # attempts per mixture, because rules may fail on some
_SINGLE_TRIALS = 20  # documents tried alone before all are, because most tasks that cannot do it fail at once
_MAX_DENOMINATOR = 500  # largest denominator of a part's weight
_SEED = 0

#: The task's own rule that makes a number of the results of several documents; it may raise any exception.
Aggregate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Explanation:
    """How a task's number follows from a number of each document.

    Attributes:
        values: numbers in [0, 1], per document and per usable reply; the replies of the methods come first.
        counted: whether the document enters the mean.
        mean_over: ``QUESTIONS``, or the field over whose values the task averages.
        weights: field value -> weight, with the sum 1 and without zeros; {} for ``QUESTIONS``.
        percent: True if the task's number is a percentage, False if it is a share.
    """

    values: Sequence[Sequence[float]]
    counted: Sequence[bool]
    mean_over: str
    percent: bool
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Mixtures:
    """Mixtures of results, each with one result per document, and the task's own number of each.

    Attributes:
        choices: index of the chosen result among the results of a document, [M, D].
        own: the task's number, [M].
    """

    choices: NDArray[np.int64]
    own: Floats


def find_explanation(
    results: Sequence[Sequence[Any]],
    aggregate: Aggregate,
    fields: Sequence[Mapping[str, str]],
    keys: Sequence[str],
    n_methods: int,
) -> Explanation | None:
    """Return the first explanation of how ``aggregate`` makes its number from the documents; None if none fits.

    None also if the task makes no number of a method's results or of enough mixtures, or the same number of all
    mixtures. Numbers of documents count as percentages if any is above 1; those outside [0, 1] or [0, 100] fit nothing.

    Args:
        results: results per document (at least one) and reply: first one per method, then those of replies that only
            serve as tests. A test reply of which the task makes no number is dropped.
        fields: the fields of each document; the task may average over the values of one that has 2 to ``MAX_PARTS``.
        keys: a key of each document; if no mean over all documents fits, only the last of those with equal keys counts.
    """
    of_replies = [[of_one[place] for of_one in results] for place in range(len(results[0]))]
    # The task makes no number of some replies: many rules fail on an empty one, for example.
    usable = [place for place, of_reply in enumerate(of_replies) if compute_number(of_reply, aggregate) is not None]
    if usable[:n_methods] != list(range(n_methods)):
        return None
    results = [[of_one[place] for place in usable] for of_one in results]
    n_parts = max((len({of_one.get(name) for of_one in fields}) for name in list_parted_fields(fields)), default=0)
    mixtures = _mix_results(results, aggregate, max(_FEWEST_MIXTURES, 3 * n_parts + 8))
    if mixtures is None:
        return None
    last = {key: number for number, key in enumerate(keys)}
    every = [True] * len(keys)
    merged = [last[key] == number for number, key in enumerate(keys)]
    for numbers in _list_numbers(results, aggregate):
        top = max(map(max, numbers))
        values = np.array(numbers) / (100.0 if top > 1 else 1.0)
        if values.min() < 0 or values.max() > 1:
            continue
        for counted in (every, merged) if merged != every else (every,):
            if (means := _find_means(values, mixtures, fields, counted)) is not None:
                mean_over, weights, scale = means
                weighing = [
                    counts and (not weights or weights[of_one[mean_over]] > 0)
                    for counts, of_one in zip(counted, fields, strict=True)
                ]
                weights = {part: weight for part, weight in weights.items() if weight}
                return Explanation(values.tolist(), weighing, mean_over, scale > 1, weights)
    return None


def as_number(value: Any) -> float | None:
    """Return a finite int, float, bool or NumPy scalar as a float; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


def compute_number(results: Sequence[Any], aggregate: Aggregate) -> float | None:
    """Return the task's own number of the results of all documents; None if it raises or makes no finite number."""
    try:
        return as_number(aggregate(_copy_results(results)))
    except Exception:  # noqa: BLE001 - the code of a task
        return None


def _copy_results(results: Sequence[Any]) -> list[Any]:
    """Return deep copies of the results, because rules may modify them."""
    try:
        pickled = pickle.dumps(list(results), pickle.HIGHEST_PROTOCOL)
        copies: list[Any] = pickle.loads(pickled)  # noqa: S301 - pickled by this process
    except Exception:  # noqa: BLE001 - results are of any type
        return deepcopy(list(results))  # several times slower
    return copies


def _mix_results(results: Sequence[Sequence[Any]], aggregate: Aggregate, count: int) -> _Mixtures | None:
    """Mix results at random, with a fixed seed, and return the mixtures of which the task makes a number.

    First come the unmixed results of each reply, then random ones, until ``count`` more than the replies are kept or
    ``_MOST_ATTEMPTS * count`` were drawn. Returns None if fewer than ``_FEWEST_MIXTURES`` have a number, or all numbers
    are the same.
    """
    n_results = len(results[0])
    draw = random.Random(_SEED)
    unmixed = [[place] * len(results) for place in range(n_results)]
    mixed = ([draw.randrange(n_results) for _ in results] for _ in range(_MOST_ATTEMPTS * count))
    kept = list[list[int]]()
    own = list[float]()
    for choice in chain(unmixed, mixed):
        mixture = [of_one[place] for of_one, place in zip(results, choice, strict=True)]
        if (number := compute_number(mixture, aggregate)) is not None:
            kept.append(choice)
            own.append(number)
        if len(own) == n_results + count:
            break
    is_telling = len(own) >= _FEWEST_MIXTURES and max(own) - min(own) > _TOLERANCE
    return _Mixtures(np.array(kept), np.array(own)) if is_telling else None


def _list_numbers(results: Sequence[Sequence[Any]], aggregate: Aggregate) -> Iterator[list[list[float]]]:
    """Yield candidates for the numbers of the documents, [D, number of replies] each, without missing numbers.

    If all results are numbers, these are the only candidate. Otherwise, the candidates are what the task makes of each
    result alone and, if all results are mappings, numbers from their fields.
    """
    if (complete := _check_complete([list(map(as_number, of_one)) for of_one in results])) is not None:
        yield complete
        return

    if None not in _aggregate_alone([of_one[0] for of_one in results[:_SINGLE_TRIALS]], aggregate):
        numbers = [_aggregate_alone(of_one, aggregate) for of_one in results]
        if (complete := _check_complete(numbers)) is not None:
            yield complete
    if all(isinstance(result, Mapping) for of_one in results for result in of_one):
        yield from _list_fields_of_results(results)


def _aggregate_alone(results: Sequence[Any], aggregate: Aggregate) -> list[float | None]:
    """Return the number that the task makes of each result by itself, or None; equal results are aggregated once."""
    seen = list[tuple[Any, float | None]]()
    for result in results:
        if any(_is_equal(result, other) for other, _ in seen):
            continue
        seen.append((result, compute_number([result], aggregate)))
    return [next(number for other, number in seen if _is_equal(result, other)) for result in results]


def _is_equal(result: Any, other: Any) -> bool:
    """Return True for equal results; False if they differ or cannot be compared, as arrays cannot."""
    try:
        return result is other or bool(result == other)
    except Exception:  # noqa: BLE001 - results are of any type
        return False


def _list_fields_of_results(results: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[list[list[float]]]:
    """Yield numbers [D, number of replies] from each field with several numbers in a document, then from all of them.

    The latter takes the first number among these fields of a result, since tasks name the fields of different kinds of
    questions differently. Candidates with a missing number are left out.
    """
    names = dict.fromkeys(
        name
        for of_one in results
        for name in of_one[0]
        if len({as_number(result.get(name)) for result in of_one} - {None}) > 1
    )
    for chosen in [*([name] for name in names), list(names)]:
        numbers = [
            [next((n for name in chosen if (n := as_number(result.get(name))) is not None), None) for result in of_one]
            for of_one in results
        ]
        if names and (complete := _check_complete(numbers)) is not None:
            yield complete


def _check_complete(numbers: list[list[float | None]]) -> list[list[float]] | None:
    """Return the numbers if none is None; otherwise None."""
    rows = [[number for number in row if number is not None] for row in numbers]
    return rows if list(map(len, rows)) == list(map(len, numbers)) else None


def _find_means(
    values: Floats, mixtures: _Mixtures, fields: Sequence[Mapping[str, str]], counted: Sequence[bool]
) -> tuple[str, dict[str, float], float] | None:
    """Return (``QUESTIONS`` or a field, weights of the field's values, scale) of the first mean that fits all mixtures.

    The plain mean is tried first, then the fields in the order of ``list_parted_fields``. The scale is 1 for shares and
    100 for percentages. Returns None if no mean fits.

    Args:
        values: [D, number of replies].
        counted: the documents that enter the mean.
    """
    drawn_MD = np.take_along_axis(values, mixtures.choices.T, axis=1).T[:, np.array(counted)]
    of_counted = [of_one for of_one, counts in zip(fields, counted, strict=True) if counts]
    for scale in (1.0, 100.0):
        if _is_equal_up_to_rounding(drawn_MD.mean(1), mixtures.own / scale):
            return QUESTIONS, {}, scale
    for name in list_parted_fields(of_counted):
        parts, part_D = np.unique([of_one[name] for of_one in of_counted], return_inverse=True)
        means_MP = np.stack([drawn_MD[:, part_D == p].mean(1) for p in range(len(parts))], axis=1)
        for scale in (1.0, 100.0):
            if (weight_P := _find_weights(means_MP, mixtures.own / scale)) is not None:
                return name, dict(zip(parts.tolist(), weight_P.tolist(), strict=True)), scale
    return None


def list_parted_fields(fields: Sequence[Mapping[str, str]]) -> list[str]:
    """List the fields that every document has, and that have 2 to ``MAX_PARTS`` distinct values.

    Fields with fewer values come first, and then texts before numbers.
    """
    names = [name for name in fields[0] if all(name in of_one for of_one in fields)] if fields else []
    values = {name: {of_one[name] for of_one in fields} for name in names}
    few = [name for name in names if 1 < len(values[name]) <= MAX_PARTS]
    return sorted(few, key=lambda name: (len(values[name]), all(map(str.isdecimal, values[name]))))


def _find_weights(means_MP: Floats, own_M: Floats) -> Floats | None:
    """Return weights [P] with the sum 1 under which the means of parts give every number of the task, or None.

    Equal weights are tried first. Others are fitted to the first 2P + 4 mixtures, rounded to fractions with
    denominators up to ``_MAX_DENOMINATOR``, and must hold for all mixtures; there are none without 8 further mixtures,
    or if the first ones do not determine them. Among these weights, a part in which no reply scores anything has 0.
    """
    n_parts = means_MP.shape[1]
    scores_P = means_MP.any(0)
    equal_P = np.full(n_parts, 1 / n_parts)
    if _is_equal_up_to_rounding(means_MP @ equal_P, own_M):
        return equal_P
    n_used = 2 * n_parts + 4
    if len(own_M) < n_used + 8 or np.linalg.matrix_rank(means_MP[:n_used]) < scores_P.sum():
        return None
    exact_P = np.linalg.lstsq(means_MP[:n_used, scores_P], own_M[:n_used], rcond=None)[0]
    # The task's numbers are rounded, so weights are slightly off: 1/24 becomes 0.0416669.
    weight_P = np.zeros(n_parts)
    weight_P[scores_P] = [float(Fraction(weight).limit_denominator(_MAX_DENOMINATOR)) for weight in exact_P]
    is_mean = (
        weight_P.min() >= 0 and abs(weight_P.sum() - 1) < 1e-6 and _is_equal_up_to_rounding(means_MP @ weight_P, own_M)
    )
    return weight_P if is_mean else None


def _is_equal_up_to_rounding(means_M: Floats, own_M: Floats) -> bool:
    """Return True if the means equal the task's numbers, up to the rounding of percentages to two decimals."""
    return bool(np.all(np.abs(means_M - own_M) <= _TOLERANCE))
