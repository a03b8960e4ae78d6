"""The selection of gstep.selection.reference on a CPU, exact and fast: lazy, in blocks, with a bound on cosines.

1. A token's distance to the nearest selected token only shrinks. A score computed earlier is an upper bound of the
current score, so a token need not be looked at while another token's current score is higher (lazy greedy).

2. A few products bound the cosine of two tokens from above. Write x = a + b, with a in a subspace of k dimensions that
holds most of the tokens' lengths, and b orthogonal to it: cos(x, y) = a.a' + b.b' <= a.a' + |b||b'| (``Subspace``). If
by this bound a selected token cannot be nearer than the nearest known one, their product over D channels is skipped.

``_Search`` runs in rounds. A round takes the K tokens of highest known score, compares each with the tokens that were
selected since its last comparison, and selects among the K as long as the best of them beats every token outside.

Shapes: S tokens of a sample, K candidates, L finalists (candidates whose score is exact and beats the rival).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep.density import (
    ZERO_DISTANCE,
    compute_row_factors,
    compute_working_scale,
    get_work_dtype,
    scale_extreme_rows,
    scale_rows,
)
from gstep.selection.reference import choose_first_token, compute_density_weight, compute_inverse_roots, find_largest

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Above this share of pairs it is cheaper to multiply all of them in one matrix product.
_DENSE = 0.15
#: The bound is switched off if it leaves more than this share of candidates to be compared in full.
_USELESS = 0.4
_TRIAL = 8  # rounds before the bound may be switched off
_LIKELIEST = 3  # picks that a candidate is compared with one by one, before all other picks that the bound leaves
_PICKS = 2048  # selected tokens that candidates are compared with at once
_ROWS = 256  # candidates whose bounds with _PICKS picks fit a core's cache
_OUT_OF_REACH = 3.0  # larger than any cosine
_SAMPLE = (384, 2048)  # minimum and maximum size of the sample for the subspace; in between, one token in 24
_NO_SUBSPACE = 0.95  # above this residual the bound says nothing about two tokens
_FAINT = 2.0**-80  # squared lengths below it may be lost in float32
_CHUNK = 2**19  # elements of tokens that fit a core's cache
#: Ten times the error of a cosine in float32, both in the bound and in the distance that it is compared with.
MARGIN = 1e-5
_STEPS = 2  # steps of subspace iteration
_CANCELLED = 4e-6  # the error of 1 - |a|^2 in float32, a difference of nearly equal numbers


@dataclass
class Counts:
    """The work of one or more selections, counted in pairs of tokens.

    Attributes:
        products: Pairs multiplied over all D channels.
        bounds: Pairs multiplied in the subspace.
        gave_up: True if the bound ruled out too few pairs and was switched off.
    """

    products: int = 0
    bounds: int = 0
    gave_up: bool = False


def lazy_density_guided_fps(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float = 0.5,
    beta: float = 1e-6,
    start: str = "density",
    candidates: int | None = None,
    dims: int | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """Select ``budget`` CPU tokens by Eqs. (9)-(12), like gstep.selection.reference.density_guided_fps but faster.

    The picks and their order are the same up to near-ties: distances differ by rounding, about 1e-7. Besides the
    tokens, memory holds the selected tokens in their work dtype and k+1 numbers per token.

    Args:
        start: Has the same meaning as there, as have the arguments above; none is checked.
        candidates: K, the candidates per round; None chooses 256, 512 or 1024 by M.
        dims: k, the dimensions of the bound's subspace; 0 disables the bound, None chooses by M and D.
        counts: If given, the work of this selection is added to it.
    """
    if alpha == 0 and start == "density":
        return find_largest(density_M, budget)
    first_1 = choose_first_token(start, scale_extreme_rows(tokens_MD) if start == "isolated" else tokens_MD, density_M)
    survey = survey_tokens(ConvertedTokens.of(tokens_MD), dims)
    search = _Search(survey, density_M, budget, alpha, beta, candidates, counts or Counts())
    search.begin(first_1.numpy())
    while search.picks.count < budget:
        search.round()
    return torch.from_numpy(search.picks.order)


def _compute_distance(products: NDArray[np.floating], scale: Floats) -> Floats:
    """Compute the cosine distances of Eq. (10) from products of raw tokens; distances below ZERO_DISTANCE become 0.

    ``scale`` is the product of both tokens' inverse norms.
    """
    distance = 1 - products.astype(np.float64) * scale
    distance[distance < ZERO_DISTANCE] = 0.0
    return distance


def _compute_cosine_thresholds(nearest: Floats) -> NDArray[np.float32]:
    """Compute the cosine above which a pick may be nearer than the nearest known pick, whose distance is ``nearest``.

    At distance 0, the threshold is out of reach.
    """
    return np.where(nearest > 0, 1 - nearest - MARGIN, _OUT_OF_REACH).astype(np.float32)


class _Rival(NamedTuple):
    """The best token that is not a candidate of a round, of equals the one with the lowest index."""

    score: float
    token: int


class _RoundRows:
    """The rows of a round's candidates in their work dtype, or all tokens if they need no conversion."""

    def __init__(self, rows: ConvertedTokens, indices: Indices) -> None:
        self._indices = None if rows.ready else indices
        self.tokens = rows.tokens if rows.ready else rows.take(indices)

    def rows_of(self, indices: Indices) -> Indices:
        """Convert candidates' token indices to their row numbers in this round's ``tokens``."""
        return indices if self._indices is None else np.searchsorted(self._indices, indices)

    def take_rows(self, indices: Indices) -> Tensor:
        """Return copies of the rows of these candidates, [K,D], in the order of ``indices``."""
        return self.tokens.index_select(0, torch.from_numpy(self.rows_of(indices)))


class _Search:
    """The state of one lazy greedy selection on a CPU.

    Attributes:
        nearest: [M], each token's distance to the nearest of the first ``n_included`` picks (and of some later picks).
        n_included: [M], the number of picks that ``nearest`` fully includes: the token's mark.
        score: [M], computed from ``nearest``, an upper bound of the current score; -inf for a selected token. It is the
            key of ``gstep.selection.reference`` if ``uses_key``, otherwise Eq. (11).
        density_term: [M], the density's contribution to the score: the weight in the key or the logarithm in Eq. (11).
        block: K, the number of candidates per round.
        uses_bound: True while candidates are first compared by the bound.
    """

    def __init__(
        self,
        survey: Survey,
        density_M: Tensor,
        budget: int,
        alpha: float,
        beta: float,
        block: int | None,
        counts: Counts,
    ) -> None:
        """Prepare a search without picks; call :meth:`begin` next.

        Args:
            block: K; None or 0 chooses 256, 512 or 1024 by M.
            counts: Updated in place.
        """
        n_tokens = len(density_M)
        self.alpha = alpha
        self.beta = beta
        self.counts = counts
        self.survey = survey
        self.picks = Picks(budget, survey)
        self.block = block or (256 if n_tokens < 16384 else 512 if n_tokens < 49152 else 1024)
        weight_M = compute_density_weight(density_M, alpha, beta)
        self.uses_key = weight_M is not None
        self.density_term: Floats = (
            (1 - alpha) * np.log(density_M.double().numpy() + beta) if weight_M is None else weight_M.numpy()
        )
        self.nearest = np.full(n_tokens, np.inf)
        self.n_included = np.zeros(n_tokens, np.int64)
        self.score = np.empty(n_tokens)
        self.uses_bound = survey.coordinates is not None
        self.n_bounded = self.n_unresolved = 0  # candidates compared by the bound, and those that it did not rule out
        self._bounds = np.empty(0, np.float32)

    def begin(self, first: Indices) -> None:
        """Select the token ``first``, [1], and score all other tokens by their distance to it and their density."""
        self.picks.add(first)
        for part, rows in self.survey.rows.chunks():
            products = self._multiply_all(rows, self.picks.rows[:1])[:, 0]
            self.nearest[part] = _compute_distance(products, self.survey.inverse[part] * self.picks.inverse[0])
        self.counts.products += len(self.nearest)
        self.n_included[:] = 1
        self.density_term[first] = -np.inf
        self.score = self._compute_scores(self.nearest, self.density_term)

    def round(self) -> None:
        """Run one round: update the best candidates' distances, then select those that are certain, if any.

        A candidate is certain if its distance includes all picks and its score is at least the rival's.
        """
        indices, rival = self._choose_candidates()
        rows = _RoundRows(self.survey.rows, indices)
        self._refresh(rows, indices, rival)
        self.score[indices] = scores = self._compute_current_scores(indices)
        certain = (self.n_included[indices] == self.picks.count) & (scores >= rival.score) & (scores > -np.inf)
        # The score of a candidate that was not compared with all picks is only an upper bound, and a candidate below
        # the rival cannot be next. If no candidate is certain, the refresh has lowered scores, and the next round takes
        # other candidates.
        if certain.any():
            self._select(rows, indices[certain], scores[certain], rival)

    def _compute_scores(self, nearest: Floats, term: Floats) -> Floats:
        """Compute Eq. (11), or its key if ``uses_key``; a selected token, whose ``term`` is -inf, gets -inf."""
        distance = nearest + self.beta
        scores: Floats = distance * term if self.uses_key else self.alpha * np.log(distance) + term
        return scores

    def _compute_current_scores(self, indices: Indices) -> Floats:
        """Compute the scores of the tokens ``indices`` from ``nearest``, without storing them."""
        return self._compute_scores(self.nearest[indices], self.density_term[indices])

    def _choose_candidates(self) -> tuple[Indices, _Rival]:
        """Return the K tokens of highest known score, in ascending index, and the best other token as the rival.

        Ties go to the lowest index. If there are at most K tokens, all are candidates and the rival's score is -inf.
        """
        score = self.score
        size = self.block
        if len(score) <= size:
            return np.arange(len(score)), _Rival(-np.inf, 0)
        # numpy's partition takes far longer on scores distributed as they are here.
        top = torch.topk(torch.from_numpy(score), size + 1)
        border = float(top.values[-1])
        sure = top.indices[:size].numpy()
        equals = np.nonzero(score == border)[0]
        sure = sure[score[sure] > border]
        tied = size - len(sure)
        return np.sort(np.concatenate([sure, equals[:tied]])), _Rival(border, int(equals[tied]))

    def _refresh(self, rows: _RoundRows, indices: Indices, rival: _Rival) -> None:
        """Update candidates' distances with all picks since their marks, and move their marks, in place.

        A candidate whose score falls below the rival's is not compared further and keeps a smaller mark.
        """
        # Picks are compared in blocks: a candidate that falls behind the rival in a block skips the later blocks. Full
        # products cost more than bounds, so without a bound the blocks are smaller.
        count = self.picks.count
        block = _PICKS if self.uses_bound else _PICKS // 4
        for start in range(int(self.n_included[indices].min()) // block * block, count, block):
            picks = slice(start, min(start + block, count))
            mark = self.n_included[indices]
            waiting = (mark >= picks.start) & (mark < picks.stop)
            candidates = indices[waiting & (self._compute_current_scores(indices) >= rival.score)]
            if len(candidates) == 0:
                continue
            if self.uses_bound:
                self._compare_by_bound(rows, candidates, picks, rival)
            else:
                self._compare(rows, candidates, picks)

    def _compare(self, rows: _RoundRows, candidates: Indices, picks: slice) -> None:
        """Update candidates with their distances to all ``picks``, computed in full, and move their marks."""
        scale = np.multiply.outer(self.survey.inverse[candidates], self.picks.inverse[picks])
        distance = _compute_distance(self._multiply_all(rows.take_rows(candidates), self.picks.rows[picks]), scale)
        self.counts.products += scale.size
        self.nearest[candidates] = np.minimum(self.nearest[candidates], distance.min(axis=1))
        self.n_included[candidates] = picks.stop

    def _multiply_all(self, a_XD: Tensor, b_YD: Tensor) -> NDArray[np.floating]:
        """Compute the product of each row of ``a`` and each row of ``b``, [X,Y], bit-equal for copies of a row."""
        # A matrix product does not guarantee that, so it is used only if there are no copies.
        if not self.survey.has_copies:
            products: NDArray[np.floating] = (a_XD @ b_YD.T).numpy()
            return products
        shape = (len(a_XD), len(b_YD))
        row, column = (indices.ravel() for indices in np.indices(shape))
        return compute_pair_products(a_XD, b_YD, row, column).reshape(shape)

    def _compare_by_bound(self, rows: _RoundRows, candidates: Indices, picks: slice, rival: _Rival) -> None:
        """Update candidates with the ``picks`` that the bound does not rule out, and move their marks.

        The three picks of highest bound come first, one by one. Candidates that fall below the rival on the way keep
        their marks. If more than 40 % of the candidates that were compared so far (after more than 8 K) had to be
        compared with further picks, the bound is switched off for the rest of the search.
        """
        bounds = self._bound_cosines(candidates, picks)
        self.n_bounded += len(candidates)
        row = np.arange(len(candidates))
        # A product with the likeliest pick often lowers ``nearest`` so far that the bound rules out all other picks.
        for _ in range(_LIKELIEST):
            likeliest = bounds[row].argmax(axis=1) if len(row) < len(candidates) else bounds.argmax(axis=1)
            nearer = bounds[row, likeliest] > _compute_cosine_thresholds(self.nearest[candidates[row]])
            self.n_included[candidates[row[~nearer]]] = picks.stop
            row, likeliest = row[nearer], likeliest[nearer]
            if len(row) == 0:
                return
            self._measure(rows, candidates[row], likeliest, picks)
            bounds[row, likeliest] = -_OUT_OF_REACH
            row = row[self._compute_current_scores(candidates[row]) >= rival.score]
        self.n_unresolved += len(row)
        if len(row):
            self._compare_pairs(rows, candidates[row], bounds[row], picks)
        if self.n_bounded > _TRIAL * self.block and self.n_unresolved > _USELESS * self.n_bounded:
            self.uses_bound = False
            self.counts.gave_up = True

    def _compare_pairs(self, rows: _RoundRows, candidates: Indices, bounds: NDArray[np.float32], picks: slice) -> None:
        """Update candidates with every pick that ``bounds`` [candidates, picks] does not rule out; move their marks.

        If these are more than 15 % of the pairs and there are no copies, all pairs are multiplied instead.
        """
        row, column = np.nonzero(bounds > _compute_cosine_thresholds(self.nearest[candidates])[:, None])
        if len(row) > _DENSE * bounds.size and not self.survey.has_copies:
            self._compare(rows, candidates, picks)
        elif len(row):
            self._measure(rows, candidates[row], column, picks)
        self.n_included[candidates] = picks.stop

    def _bound_cosines(self, candidates: Indices, picks: slice) -> NDArray[np.float32]:
        """Compute upper bounds of cosines, [candidates, picks]; -3 for pairs already compared, to rule them out.

        The result is a view of a buffer that the next call overwrites.
        """
        assert self.picks.coordinates is not None
        shape = (len(candidates), picks.stop - picks.start)
        size = shape[0] * shape[1]
        if len(self._bounds) < size:
            self._bounds = np.empty(size, np.float32)  # new memory for every product would cost more than the product
        bounds = self._bounds[:size].reshape(shape)
        coordinates = self._get_coordinates(candidates)
        columns = self.picks.coordinates[picks].T
        for start in range(0, len(candidates), _ROWS):
            rows = slice(start, start + _ROWS)
            torch.mm(coordinates[rows], columns, out=torch.from_numpy(bounds[rows]))
        self.counts.bounds += size
        mark = self.n_included[candidates]
        if mark.max() > picks.start:
            bounds[np.arange(picks.start, picks.stop) < mark[:, None]] = -_OUT_OF_REACH
        return bounds

    def _get_coordinates(self, indices: Indices) -> Tensor:
        """Return the subspace coordinates of the tokens ``indices``, [len(indices), k+1]."""
        assert self.survey.coordinates is not None
        return self.survey.coordinates.index_select(0, torch.from_numpy(indices))

    def _measure(self, rows: _RoundRows, candidates: Indices, column: Indices, picks: slice) -> None:
        """Lower ``nearest`` of each ``candidates[i]`` to its distance to pick ``column[i]`` if that is less.

        Marks are not moved. ``candidates`` are token indices, ascending, with repetitions; ``column`` counts within
        ``picks``.
        """
        products = compute_pair_products(rows.tokens, self.picks.rows[picks], rows.rows_of(candidates), column)
        scale = self.survey.inverse[candidates] * self.picks.inverse[picks][column]
        np.minimum.at(self.nearest, candidates, _compute_distance(products, scale))
        self.counts.products += len(candidates)

    def _select(self, rows: _RoundRows, finalists: Indices, score: Floats, rival: _Rival) -> None:
        """Select finalists one after the other as long as the best of them beats the rival and the budget allows.

        The distances, scores and marks of all finalists are updated with these picks, in place.

        Args:
            finalists: Token indices, ascending, whose distances include all picks.
            score: Their current scores; modified in place.
        """
        nearest = self.nearest[finalists]
        term = self.density_term[finalists]
        distance_LL = self._measure_mutual_distances(rows, finalists)
        winners: list[int] = []
        n_free = len(self.picks.order) - self.picks.count
        while len(winners) < n_free:
            best = int(score.argmax())
            if (-score[best], finalists[best]) >= (-rival.score, rival.token) or score[best] == -np.inf:
                break
            winners.append(best)
            term[best] = score[best] = -np.inf
            closer = np.nonzero(distance_LL[best] < nearest)[0]
            nearest[closer] = distance_LL[best][closer]
            # No other score changes.
            score[closer] = self._compute_scores(nearest[closer], term[closer])
        self.picks.add(finalists[winners])
        self.nearest[finalists] = nearest
        self.density_term[finalists] = term
        self.score[finalists] = score
        self.n_included[finalists] = self.picks.count

    def _measure_mutual_distances(self, rows: _RoundRows, finalists: Indices) -> Floats:
        """Compute the finalists' mutual distances, [L,L]; inf for pairs that the bound rules out for both.

        All pairs are computed in one matrix product unless there are copies or the bound leaves less than 15 % of them.
        """
        scale = self.survey.inverse[finalists]
        size = len(finalists)
        row, column = np.triu_indices(size, 1) if self.survey.has_copies else (None, None)
        if self.uses_bound:
            coordinates = self._get_coordinates(finalists)
            self.counts.bounds += size * (size - 1) // 2
            threshold = _compute_cosine_thresholds(self.nearest[finalists])
            # A pair matters if either token could come nearer to the other: the lower of the two thresholds.
            near = (coordinates @ coordinates.T).numpy() > np.minimum(threshold[:, None], threshold)
            pairs = np.nonzero(np.triu(near, 1))
            if self.survey.has_copies or len(pairs[0]) < _DENSE * size * size / 2:
                row, column = pairs
        if row is None or column is None:
            self.counts.products += size * (size - 1) // 2
            tokens_LD = rows.take_rows(finalists)
            return _compute_distance((tokens_LD @ tokens_LD.T).numpy(), np.multiply.outer(scale, scale))
        distance_LL = np.full((size, size), np.inf)
        self.counts.products += len(row)
        row_of = rows.rows_of(finalists)
        products = compute_pair_products(rows.tokens, rows.tokens, row_of[row], row_of[column])
        distance = _compute_distance(products, scale[row] * scale[column])
        distance_LL[row, column] = distance_LL[column, row] = distance
        return distance_LL


@dataclass(frozen=True)
class ConvertedTokens:
    """Tokens of any float dtype, converted to their work dtype and scaled a few at a time, without a whole copy.

    Attributes:
        factor: [M] float64, the factors of gstep.density.compute_row_factors; None if no row needs one.
    """

    tokens: Tensor
    factor: Tensor | None

    @classmethod
    def of(cls, tokens: Tensor) -> ConvertedTokens:
        """Wrap ``tokens``, with row factors if their largest magnitude is out of range or they are float64.

        16-bit and float32 rows that are too small while the largest magnitude is in range get no factors here.
        """
        in_range = tokens.dtype != torch.float64 and compute_working_scale(tokens) == 1.0
        return cls(tokens, None if in_range else compute_row_factors(tokens))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which products of the tokens are computed."""
        return get_work_dtype(self.tokens)

    @property
    def ready(self) -> bool:
        """True if the tokens can be multiplied without conversion."""
        return self.tokens.dtype == self.dtype and self.factor is None

    def take(self, indices: Indices) -> Tensor:
        """Return the converted rows at these indices, as a copy."""
        rows = torch.from_numpy(indices)
        factor = None if self.factor is None else self.factor[rows]
        return scale_rows(self.tokens.index_select(0, rows), factor)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in order as (slice of M, converted rows), in chunks that fit a core's cache."""
        step = max(1, _CHUNK // self.tokens.shape[1])
        for start in range(0, len(self.tokens), step):
            part = slice(start, start + step)
            yield part, scale_rows(self.tokens[part], None if self.factor is None else self.factor[part])


class Survey(NamedTuple):
    """The results of one pass over all tokens.

    Attributes:
        rows: The tokens, with row factors if they need any.
        inverse: [M] 1 / norm, 0 for a zero token.
        coordinates: [M,k+1], see ``Subspace.coordinates``; None if a bound would not pay off.
        has_copies: True if some tokens are equal bit for bit; rarely, also if no tokens are.
    """

    rows: ConvertedTokens
    inverse: Floats
    coordinates: Tensor | None
    has_copies: bool


def survey_tokens(rows: ConvertedTokens, dims: int | None = None) -> Survey:
    """Compute inverse norms and subspace coordinates in one pass over all tokens, and find whether there may be copies.

    ``has_copies`` compares the norm and the first and last channel: it is never False if two tokens are equal, and
    rarely True if none are. A second pass with row factors is made if a row turns out to be too small for float32
    (squared length below 2^-80). ``dims`` is k of the bound's subspace: 0 for no bound, None to choose 32, 48 or 64 by
    M, or 0 if D < 8k or M <= 384. There is no bound either if more than 95 % of the tokens' squared lengths lie outside
    the subspace.
    """
    n_tokens, hidden = rows.tokens.shape
    if dims is None:
        dims = 32 if n_tokens < 4096 else 48 if n_tokens < 16384 else 64
        # A bound costs k / D of a product, so it saves little if k is near D. Of few tokens, the sample would be all.
        dims = dims if hidden >= 8 * dims and n_tokens > _SAMPLE[0] else 0
    subspace = _sample_subspace(rows, dims) if dims else None
    if subspace is not None and subspace.residual > _NO_SUBSPACE:
        subspace = None
    squared_M = torch.empty(n_tokens, dtype=rows.dtype, device="cpu")
    coordinates = None if subspace is None else subspace.basis.new_empty(n_tokens, subspace.dims + 1)
    for part, tokens in rows.chunks():
        squared_M[part] = tokens.square().sum(dim=1)
        if subspace is not None and coordinates is not None:
            coordinates[part] = subspace.coordinates(tokens, compute_inverse_roots(squared_M[part]).float())
    if rows.factor is None and squared_M.min() < _FAINT and (factor := compute_row_factors(rows.tokens)) is not None:
        return survey_tokens(replace(rows, factor=factor), dims)
    # Copies agree in their norm and in their first and last channel; other tokens hardly ever do. Comparing three
    # numbers per token is far cheaper than comparing tokens.
    ends = rows.tokens[:, [0, -1]].double()
    traits = torch.cat([squared_M[:, None].double(), ends], dim=1).numpy()
    return Survey(
        rows=rows,
        inverse=compute_inverse_roots(squared_M).numpy(),
        coordinates=coordinates,
        has_copies=len(np.unique(traits, axis=0)) < n_tokens,
    )


def _sample_subspace(rows: ConvertedTokens, dims: int) -> Subspace:
    """Fit a subspace of ``dims`` dimensions to a seeded random sample of the tokens (M / 24, but 384 to 2048)."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = min(max(len(rows.tokens) // 24, _SAMPLE[0]), _SAMPLE[1])
    sample = torch.randperm(len(rows.tokens), generator=generator, device="cpu")[:size]
    tokens_SD = rows.take(sample.numpy()).float()
    return Subspace.of(tokens_SD * compute_inverse_roots(tokens_SD.square().sum(dim=1)).float()[:, None], dims)


class Picks:
    """The selected tokens in order, with the rows, inverse norms and coordinates that candidates are compared with.

    The arrays have B entries, of which the first ``count`` are valid. ``coordinates`` is None without a bound.
    """

    def __init__(self, budget: int, survey: Survey) -> None:
        """Allocate memory for ``budget`` picks."""
        coordinates = survey.coordinates
        self.count = 0
        self.order = np.empty(budget, np.int64)
        self.rows = survey.rows.tokens.new_empty(budget, survey.rows.tokens.shape[1], dtype=survey.rows.dtype)
        self.inverse = np.empty(budget)
        self.coordinates = None if coordinates is None else coordinates.new_empty(budget, coordinates.shape[1])
        self._survey = survey

    def add(self, indices: Indices) -> None:
        """Append the tokens ``indices``."""
        end = slice(self.count, self.count + len(indices))
        self.order[end] = indices
        self.rows[end] = self._survey.rows.take(indices)
        self.inverse[end] = self._survey.inverse[indices]
        if self.coordinates is not None and self._survey.coordinates is not None:
            self.coordinates[end] = self._survey.coordinates[torch.from_numpy(indices)]
        self.count = end.stop


@dataclass(frozen=True)
class Subspace:
    """The directions along which tokens are longest: the uncentered principal components of a sample.

    Attributes:
        basis: [D,k] float32 with orthonormal columns.
        residual: The mean share of a token's squared length outside the subspace, measured on tokens that were not used
            for the fit.
    """

    basis: Tensor
    residual: float

    @classmethod
    def of(cls, directions_SD: Tensor, dims: int) -> Subspace:
        """Fit a subspace to three quarters of these unit tokens, and measure its residual on the rest.

        ``directions_SD`` is float32, with S >= 4. The fit is two steps of subspace iteration from seeded random
        directions, which come within a few percent of the residual of the true principal components.
        """
        is_test = torch.arange(len(directions_SD), device="cpu") % 4 == 3
        fit_SD, test_SD = directions_SD[~is_test], directions_SD[is_test]
        generator = torch.Generator("cpu").manual_seed(0)
        basis_DK = torch.randn(fit_SD.shape[1], dims, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(_STEPS):  # each product with X^T X stretches the basis along the principal directions
            basis_DK, _ = torch.linalg.qr(fit_SD.T @ (fit_SD @ basis_DK))
        outside = test_SD.square().sum(dim=1) - (test_SD @ basis_DK).square().sum(dim=1)
        return cls(basis_DK, float(outside.mean()))

    @property
    def dims(self) -> int:
        """The number k of dimensions."""
        return self.basis.shape[1]

    def coordinates(self, tokens_MD: Tensor, inverse_norm_M: Tensor) -> Tensor:
        """Compute coordinates, [M,k+1] float32, whose inner product bounds two tokens' cosine from above, up to MARGIN.

        The first k are those of the normalized token in the subspace, and the last is the length of the remainder.
        """
        inside_MK = (tokens_MD.float() @ self.basis).mul_(inverse_norm_M[:, None])
        # |b| by Pythagoras, as normalized tokens have length 1. The error is added, so that the bound is never too low.
        outside_M = (1 - inside_MK.square().sum(dim=1)).clamp_min_(0).add_(_CANCELLED).sqrt_()
        return torch.cat([inside_MK, outside_M[:, None]], dim=1)


def compute_pair_products(a_XD: Tensor, b_YD: Tensor, row: Indices, column: Indices) -> NDArray[np.floating]:
    """Compute the inner product of ``a[row[i]]`` and ``b[column[i]]`` for each i; ``row`` ascends and may repeat.

    A product depends only on the two rows, so that copies of a token have bit-equal products.
    """
    if not _has_sampled_products():
        return _multiply_slowly(a_XD, b_YD, row, column)
    starts = np.zeros(len(a_XD) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(a_XD)), out=starts[1:])
    pattern = torch.sparse_csr_tensor(
        torch.from_numpy(starts),
        torch.from_numpy(column),
        a_XD.new_zeros(len(column)),
        size=(len(a_XD), len(b_YD)),
        device=a_XD.device,
        check_invariants=False,
    )
    products: NDArray[np.floating] = torch.sparse.sampled_addmm(pattern, a_XD, b_YD.T, beta=0.0).values().numpy()
    return products


def _multiply_slowly(
    a_XD: Tensor, b_YD: Tensor, row: Indices, column: Indices, block: int = 256
) -> NDArray[np.floating]:
    """Compute ``compute_pair_products`` in blocks, several times slower, for torch builds without sampled products."""
    a_P = torch.from_numpy(row)
    b_P = torch.from_numpy(column)
    products = a_XD.new_empty(len(row))
    for start in range(0, len(row), block):
        part = slice(start, start + block)
        products[part] = (a_XD[a_P[part]] * b_YD[b_P[part]]).sum(dim=1)
    array: NDArray[np.floating] = products.numpy()
    return array


@cache
def _has_sampled_products() -> bool:
    """Return True if this build of torch can compute sampled products; its beta warning is suppressed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        try:
            unit = torch.ones(1, 1, dtype=torch.float32, device="cpu")
            start = torch.tensor([0, 1], device="cpu")
            column = torch.tensor([0], device="cpu")
            pattern = torch.sparse_csr_tensor(start, column, unit[0], size=(1, 1), device="cpu", check_invariants=False)
            return bool(torch.sparse.sampled_addmm(pattern, unit, unit, beta=0.0).values() == 1)
        except RuntimeError:
            return False
