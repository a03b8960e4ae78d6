"""The selection of gstep.selection.reference on a CPU, exact and fast: lazy, in blocks, by a bound.

Two facts make it exact. A token's distance to the nearest selected one only shrinks, so a score worked out earlier is
an upper bound of today's: a token need not be looked at while another one's true score is known to be higher (lazy
greedy). And a few products bound the cosine of two tokens from above (gstep.selection.subspace), so that most selected
tokens are seen not to be nearer than the nearest one known.

A round takes the K tokens of the highest known scores, refreshes them against what was selected since each was last
refreshed, and selects among them for as long as the best of them beats every token outside.

Shapes: M tokens, D hidden size, B budget, K candidates, L of them that are left, P selected tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep.density import ZERO_DISTANCE, level_copy
from gstep.selection.products import Places, pair_products
from gstep.selection.reference import density_weight, largest, starting_token
from gstep.selection.subspace import MARGIN
from gstep.selection.survey import Floats, Picks, Rows, Survey, survey

#: Beyond this share of pairs it is cheaper to multiply all of them in one matrix product.
_DENSE = 0.15
#: The bound is given up where it leaves more than this share of candidates to be compared in full.
_USELESS = 0.4
_TRIAL = 8  # rounds before the bound may be given up
_LIKELIEST = 3  # picks that a candidate is compared with one by one, before all others that the bound leaves
_PICKS = 2048  # selected tokens that candidates are compared with at once
_ROWS = 256  # candidates whose bounds with these stay in a core's cache
_OUT_OF_REACH = 3.0  # larger than any cosine


@dataclass
class Counts:
    """The counted work of one selection, which shows that most is spared.

    Attributes:
        products: pairs of tokens multiplied in all D dimensions.
        bounds: pairs multiplied in the subspace.
        gave_up: whether the bound was found useless and left.
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
    """Select as gstep.selection.reference.density_guided_fps does, for tokens on the CPU.

    The same tokens in the same order, up to near ties.

    Distances are rounded otherwise, by about 1e-7; where products of tokens are exact in float32 the order is the same
    to the last, on every CPU: gstep.selection.reference says why. Memory beyond the tokens: the selected ones in their
    work dtype, and k+1 numbers a token.

    Args:
        candidates: K; None chooses by M.
        dims: of the subspace of the bound; 0 does without, None chooses by M and D.
        counts: gets what the selection took.
    """
    if alpha == 0 and start == "density":
        return largest(density_M, budget)
    first_1 = starting_token(start, level_copy(tokens_MD) if start == "isolated" else tokens_MD, density_M)
    known = survey(Rows.of(tokens_MD), dims)
    search = _Search(known, density_M, budget, alpha, beta, candidates, counts or Counts())
    search.begin(first_1.numpy())
    while search.picks.count < budget:
        search.round()
    return torch.from_numpy(search.picks.order)


def _distance(products: NDArray[np.floating], scale: Floats) -> Floats:
    """Compute Eq. (10) from products of raw tokens and of their inverse norms, 0 below ZERO_DISTANCE."""
    distance = 1 - products.astype(np.float64) * scale
    distance[distance < ZERO_DISTANCE] = 0.0
    return distance


def _cosine_threshold(nearest: Floats) -> NDArray[np.float32]:
    """Return the cosine bound above which a pick may be nearer to a token than its nearest known pick."""
    return np.where(nearest > 0, 1 - nearest - MARGIN, _OUT_OF_REACH).astype(np.float32)


class _Rival(NamedTuple):
    """The best of the tokens outside of a round: its score and, among equals, its lowest place."""

    score: float
    place: int


class _RoundRows:
    """The rows of a round's candidates, in their work dtype: all tokens where that needs no copy."""

    def __init__(self, rows: Rows, places: Places) -> None:
        self._places = None if rows.ready else places
        self.tokens = rows.tokens if rows.ready else rows.take(places)

    def rows_of(self, places: Places) -> Places:
        """Turn the places of candidates among all tokens, ascending, into their rows in this round's ``tokens``."""
        return places if self._places is None else np.searchsorted(self._places, places)

    def of(self, places: Places) -> Tensor:
        """Return the rows of these tokens, given by their places among all tokens."""
        return self.tokens.index_select(0, torch.from_numpy(self.rows_of(places)))


class _Search:
    """The state of a lazy greedy selection on a CPU.

    Of every token: the distance to the nearest of the first ``seen`` picks (and of some later ones), and the score that
    follows from it, -inf once the token is selected. A score is the key of gstep.selection.reference where there is
    one.
    """

    def __init__(
        self,
        known: Survey,
        density_M: Tensor,
        budget: int,
        alpha: float,
        beta: float,
        block: int | None,
        counts: Counts,
    ) -> None:
        n_tokens = len(density_M)
        self.alpha, self.beta, self.counts, self.known = alpha, beta, counts, known
        self.picks = Picks(budget, known)
        self.block = block or (256 if n_tokens < 16384 else 512 if n_tokens < 49152 else 1024)
        weight_M = density_weight(density_M, alpha, beta)
        self.by_key = weight_M is not None
        self.term: Floats = (
            (1 - alpha) * np.log(density_M.double().numpy() + beta) if weight_M is None else weight_M.numpy()
        )
        self.nearest = np.full(n_tokens, np.inf)
        self.seen = np.zeros(n_tokens, np.int64)
        self.score = np.empty(n_tokens)
        self.by_bound = known.coordinates is not None
        self.tried = self.left = 0  # candidates that went through the bound, and those that it left
        self._bounds = np.empty(0, np.float32)

    def begin(self, first: Places) -> None:
        """Select the first token and measure all others' distance to it."""
        self.picks.add(first)
        for part, rows in self.known.rows.chunks():
            products = self._all_products(rows, self.picks.rows[:1])[:, 0]
            self.nearest[part] = _distance(products, self.known.inverse[part] * self.picks.inverse[0])
        self.counts.products += len(self.nearest)
        self.seen[:] = 1
        self.term[first] = -np.inf
        self.score = self._scores(self.nearest, self.term)

    def round(self) -> None:
        """Select the next tokens, as many as are certain."""
        places, rival = self._best_candidates()
        rows = _RoundRows(self.known.rows, places)
        self._refresh(rows, places, rival)
        self.score[places] = scores = self._scores_of(places)
        left = (self.seen[places] == self.picks.count) & (scores >= rival.score) & (scores > -np.inf)
        # The score of a candidate that has not seen all picks is only an upper bound, and one below the rival cannot be
        # next. Where none is left, the refresh has lowered scores, and the next round takes other candidates.
        if left.any():
            self._select(rows, places[left], scores[left], rival)

    def _scores(self, nearest: Floats, term: Floats) -> Floats:
        """Compute Eq. (11), or its key; -inf where the density term is, which marks a selected token."""
        distance = nearest + self.beta
        scores: Floats = distance * term if self.by_key else self.alpha * np.log(distance) + term
        return scores

    def _scores_of(self, places: Places) -> Floats:
        """Compute the current scores of the tokens at ``places``."""
        return self._scores(self.nearest[places], self.term[places])

    def _best_candidates(self) -> tuple[Places, _Rival]:
        """Find the K tokens of the highest known scores, equals by lowest place, and the best of the others."""
        score, size = self.score, self.block
        if len(score) <= size:
            return np.arange(len(score)), _Rival(-np.inf, 0)
        # numpy's partition takes far longer on scores that lie as they do here
        top = torch.topk(torch.from_numpy(score), size + 1)
        border = float(top.values[-1])
        sure = top.indices[:size].numpy()
        equals = np.nonzero(score == border)[0]
        sure = sure[score[sure] > border]
        tied = size - len(sure)
        return np.sort(np.concatenate([sure, equals[:tied]])), _Rival(border, int(equals[tied]))

    def _refresh(self, rows: _RoundRows, places: Places, rival: _Rival) -> None:
        """Update candidates' distances with the picks made since each was last updated, until none beats the rival."""
        # Picks in blocks: a candidate that falls behind the rival in one is spared the later ones. Products in full
        # cost more than bounds, so without a bound the blocks are smaller.
        count, block = self.picks.count, _PICKS if self.by_bound else _PICKS // 4
        for start in range(int(self.seen[places].min()) // block * block, count, block):
            picks = slice(start, min(start + block, count))
            seen = self.seen[places]
            waiting = (seen >= picks.start) & (seen < picks.stop)
            which = places[waiting & (self._scores_of(places) >= rival.score)]
            if len(which) == 0:
                continue
            if self.by_bound:
                self._compare_by_bound(rows, which, picks, rival)
            else:
                self._compare(rows, which, picks)

    def _compare(self, rows: _RoundRows, which: Places, picks: slice) -> None:
        """Measure all distances of some candidates to some picks."""
        scale = np.multiply.outer(self.known.inverse[which], self.picks.inverse[picks])
        distance = _distance(self._all_products(rows.of(which), self.picks.rows[picks]), scale)
        self.counts.products += scale.size
        self.nearest[which] = np.minimum(self.nearest[which], distance.min(axis=1))
        self.seen[which] = picks.stop

    def _all_products(self, a_XD: Tensor, b_YD: Tensor) -> NDArray[np.floating]:
        """Multiply each row with each; copies of a row get equal products, which a matrix product does not promise."""
        if not self.known.has_copies:
            products: NDArray[np.floating] = (a_XD @ b_YD.T).numpy()
            return products
        shape = (len(a_XD), len(b_YD))
        row, column = (places.ravel() for places in np.indices(shape))
        return pair_products(a_XD, b_YD, row, column).reshape(shape)

    def _compare_by_bound(self, rows: _RoundRows, which: Places, picks: slice, rival: _Rival) -> None:
        """Measure candidates against the picks that may be nearer than the nearest known, likeliest ones first."""
        bounds = self._cosine_bounds(which, picks)
        self.tried += len(which)
        row = np.arange(len(which))
        # One product with the likeliest pick often lowers ``nearest`` so far that the bound rules out all others.
        for _ in range(_LIKELIEST):
            likeliest = bounds[row].argmax(axis=1) if len(row) < len(which) else bounds.argmax(axis=1)
            nearer = bounds[row, likeliest] > _cosine_threshold(self.nearest[which[row]])
            self.seen[which[row[~nearer]]] = picks.stop
            row, likeliest = row[nearer], likeliest[nearer]
            if len(row) == 0:
                return
            self._measure(rows, which[row], likeliest, picks)
            bounds[row, likeliest] = -_OUT_OF_REACH
            row = row[self._scores_of(which[row]) >= rival.score]
        self.left += len(row)
        if len(row):
            self._compare_the_rest(rows, which[row], bounds[row], picks)
        if self.tried > _TRIAL * self.block and self.left > _USELESS * self.tried:
            self.by_bound, self.counts.gave_up = False, True

    def _compare_the_rest(self, rows: _RoundRows, which: Places, bounds: NDArray[np.float32], picks: slice) -> None:
        """Measure the candidate-pick pairs whose bound says the pick may be nearer than the nearest known one."""
        row, column = np.nonzero(bounds > _cosine_threshold(self.nearest[which])[:, None])
        if len(row) > _DENSE * bounds.size and not self.known.has_copies:
            self._compare(rows, which, picks)
        elif len(row):
            self._measure(rows, which[row], column, picks)
        self.seen[which] = picks.stop

    def _cosine_bounds(self, which: Places, picks: slice) -> NDArray[np.float32]:
        """Return upper bounds [candidates, picks] of their cosines; -3 where the pair was compared already."""
        assert self.picks.coordinates is not None
        shape = (len(which), picks.stop - picks.start)
        size = shape[0] * shape[1]
        if len(self._bounds) < size:
            self._bounds = np.empty(size, np.float32)  # fresh memory for every product would cost more than the product
        bounds = self._bounds[:size].reshape(shape)
        coordinates, columns = self._coordinates(which), self.picks.coordinates[picks].T
        for start in range(0, len(which), _ROWS):
            rows = slice(start, start + _ROWS)
            torch.mm(coordinates[rows], columns, out=torch.from_numpy(bounds[rows]))
        self.counts.bounds += size
        seen = self.seen[which]
        if seen.max() > picks.start:
            bounds[np.arange(picks.start, picks.stop) < seen[:, None]] = -_OUT_OF_REACH
        return bounds

    def _coordinates(self, places: Places) -> Tensor:
        """Return the subspace coordinates of the tokens at ``places``."""
        assert self.known.coordinates is not None
        return self.known.coordinates.index_select(0, torch.from_numpy(places))

    def _measure(self, rows: _RoundRows, which: Places, column: Places, picks: slice) -> None:
        """Measure candidate ``which[i]`` (ascending) against pick ``column[i]`` of ``picks``."""
        products = pair_products(rows.tokens, self.picks.rows[picks], rows.rows_of(which), column)
        scale = self.known.inverse[which] * self.picks.inverse[picks][column]
        np.minimum.at(self.nearest, which, _distance(products, scale))
        self.counts.products += len(which)

    def _select(self, rows: _RoundRows, left: Places, score: Floats, rival: _Rival) -> None:
        """Select candidates ``left`` one after the other, for as long as the best of them beats the rival."""
        nearest, term = self.nearest[left], self.term[left]
        distance_LL = self._mutual_distances(rows, left)
        chosen: list[int] = []
        room = len(self.picks.order) - self.picks.count
        while len(chosen) < room:
            best = int(score.argmax())
            if (-score[best], left[best]) >= (-rival.score, rival.place) or score[best] == -np.inf:
                break
            chosen.append(best)
            term[best] = score[best] = -np.inf
            nearer = np.nonzero(distance_LL[best] < nearest)[0]
            nearest[nearer] = distance_LL[best][nearer]
            # No other score changes.
            score[nearer] = self._scores(nearest[nearer], term[nearer])
        self.picks.add(left[chosen])
        self.nearest[left], self.term[left], self.score[left] = nearest, term, score
        self.seen[left] = self.picks.count

    def _mutual_distances(self, rows: _RoundRows, left: Places) -> Floats:
        """Compute the candidates' mutual distances [L,L]; infinite where a pair cannot change either's nearest pick."""
        scale, size = self.known.inverse[left], len(left)
        row, column = np.triu_indices(size, 1) if self.known.has_copies else (None, None)
        if self.by_bound:
            coordinates = self._coordinates(left)
            self.counts.bounds += size * (size - 1) // 2
            nearer = _cosine_threshold(self.nearest[left])
            # A pair matters where either token could come nearer to the other: the lower of the two thresholds.
            near = (coordinates @ coordinates.T).numpy() > np.minimum(nearer[:, None], nearer)
            pairs = np.nonzero(np.triu(near, 1))
            if self.known.has_copies or len(pairs[0]) < _DENSE * size * size / 2:
                row, column = pairs
        if row is None or column is None:
            self.counts.products += size * (size - 1) // 2
            tokens_LD = rows.of(left)
            return _distance((tokens_LD @ tokens_LD.T).numpy(), np.multiply.outer(scale, scale))
        distance_LL = np.full((size, size), np.inf)
        self.counts.products += len(row)
        at = rows.rows_of(left)
        products = pair_products(rows.tokens, rows.tokens, at[row], at[column])
        distance = _distance(products, scale[row] * scale[column])
        distance_LL[row, column] = distance_LL[column, row] = distance
        return distance_LL
