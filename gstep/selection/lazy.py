"""The selection of gstep.selection.reference on a CPU, exact and fast: lazy, in blocks, by a bound.

Three facts make it exact and fast.

1. A token's distance to the nearest selected token only shrinks. A score computed earlier is an upper bound of the
   current score, so a token is not looked at while another token's current score is higher (lazy greedy).
2. A few products bound the cosine of two tokens from above. Write x = a + b, with a in a subspace of k dimensions that
   holds most of the tokens, and b orthogonal to it: cos(x, y) = a.a' + b.b' <= a.a' + |b||b'| (``Subspace``). Where the
   bound says that a selected token is not nearer than the nearest known one, their D products are spared.
3. The selected tokens' rows lie side by side, and tokens are converted in pieces that a core's cache holds, so that no
   whole copy of the video's tokens is made (``ConvertedTokens``, ``Picks``).

``survey`` looks at all tokens once: their lengths, their coordinates in the subspace, and whether some are copies.
``_Search`` then goes in rounds. A round takes the K tokens of the highest known scores, compares each with the tokens
that were selected since it was last compared, and selects among the K for as long as the best of them beats every token
outside. Few of M * B pairs are multiplied in all D dimensions: ``Counts`` says how many.

Shapes: M tokens, S of them a sample, D hidden size, B budget, k dimensions of the subspace, K candidates, L of them
that are left, P selected tokens.
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

from gstep.density import ZERO_DISTANCE, level_copy, row_factors, scaled_rows, work_dtype, working_scale
from gstep.selection.reference import density_weight, inverse_roots, largest, starting_token

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

#: Beyond this share of pairs it is cheaper to multiply all of them in one matrix product.
_DENSE = 0.15
#: The bound is given up where it leaves more than this share of candidates to be compared in full.
_USELESS = 0.4
_TRIAL = 8  # rounds before the bound may be given up
_LIKELIEST = 3  # picks that a candidate is compared with one by one, before all others that the bound leaves
_PICKS = 2048  # selected tokens that candidates are compared with at once
_ROWS = 256  # candidates whose bounds with these stay in a core's cache
_OUT_OF_REACH = 3.0  # larger than any cosine
_SAMPLE = (384, 2048)  # fewest and most tokens of the sample that the subspace is made of, else one token in 24
_NO_SUBSPACE = 0.95  # above this residual the bound tells nothing about two tokens
_FAINT = 2.0**-80  # squared lengths below it may be lost in float32
_CHUNK = 2**19  # elements of tokens that stay in a core's cache
#: Ten times what float32 moves a cosine by, in the bound or in the distance that it stands for.
MARGIN = 1e-5
_STEPS = 2  # steps of subspace iteration
_CANCELLED = 4e-6  # the error that float32 leaves in 1 - |a|^2, a difference of nearly equal numbers


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
    known = survey(ConvertedTokens.of(tokens_MD), dims)
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

    def __init__(self, rows: ConvertedTokens, places: Places) -> None:
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


@dataclass(frozen=True)
class ConvertedTokens:
    """Tokens of any float dtype; converted to their work dtype and scaled a few at a time, so no whole copy exists.

    Attributes:
        factor: [M], see gstep.density.row_factors; None where no row needs one.
    """

    tokens: Tensor
    factor: Tensor | None

    @classmethod
    def of(cls, tokens: Tensor) -> ConvertedTokens:
        """Describe the rows of ``tokens``.

        Of 16-bit and float32 rows that are all small or mixed, only ``survey`` finds those that need a factor.
        """
        known = tokens.dtype != torch.float64 and working_scale(tokens) == 1.0
        return cls(tokens, None if known else row_factors(tokens))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which products of the tokens are computed."""
        return work_dtype(self.tokens)

    @property
    def ready(self) -> bool:
        """Whether the tokens can be multiplied as they are."""
        return self.tokens.dtype == self.dtype and self.factor is None

    def take(self, places: Places) -> Tensor:
        """Return the rows at these places, converted."""
        place = torch.from_numpy(places)
        factor = None if self.factor is None else self.factor[place]
        return scaled_rows(self.tokens.index_select(0, place), factor)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in turn, as many as a core's cache holds."""
        step = max(1, _CHUNK // self.tokens.shape[1])
        for start in range(0, len(self.tokens), step):
            part = slice(start, start + step)
            yield part, scaled_rows(self.tokens[part], None if self.factor is None else self.factor[part])


class Survey(NamedTuple):
    """The results of one pass over all tokens.

    Attributes:
        inverse: [M] 1 / norm, 0 of a zero token.
        coordinates: [M,k+1], see Subspace; None where a bound would not pay.
        has_copies: whether some tokens are the same, bit for bit. In rare cases true although none are; never false
            although some are.
    """

    rows: ConvertedTokens
    inverse: Floats
    coordinates: Tensor | None
    has_copies: bool


def survey(rows: ConvertedTokens, dims: int | None = None) -> Survey:
    """Look at all tokens once. ``dims`` is k of the bound's subspace: 0 for no bound, None to choose by M and D."""
    n_tokens, hidden = rows.tokens.shape
    if dims is None:
        dims = 32 if n_tokens < 4096 else 48 if n_tokens < 16384 else 64
        # A bound costs k / D of a product, so it saves little with k near D; of few tokens all would be the sample.
        dims = dims if hidden >= 8 * dims and n_tokens > _SAMPLE[0] else 0
    subspace = _subspace(rows, dims) if dims else None
    if subspace is not None and subspace.residual > _NO_SUBSPACE:
        subspace = None
    squared_M = torch.empty(n_tokens, dtype=rows.dtype, device="cpu")
    coordinates = None if subspace is None else subspace.basis.new_empty(n_tokens, subspace.dims + 1)
    for part, tokens in rows.chunks():
        squared_M[part] = tokens.square().sum(dim=1)
        if subspace is not None and coordinates is not None:
            coordinates[part] = subspace.coordinates(tokens, inverse_roots(squared_M[part]).float())
    if rows.factor is None and squared_M.min() < _FAINT and (factor := row_factors(rows.tokens)) is not None:
        return survey(replace(rows, factor=factor), dims)
    # Copies agree in their length and in their first and last channel; other tokens hardly ever do. Comparing three
    # numbers a token is far cheaper than comparing tokens.
    ends = rows.tokens[:, [0, -1]].double()
    traits = torch.cat([squared_M[:, None].double(), ends], dim=1).numpy()
    return Survey(
        rows=rows,
        inverse=inverse_roots(squared_M).numpy(),
        coordinates=coordinates,
        has_copies=len(np.unique(traits, axis=0)) < n_tokens,
    )


def _subspace(rows: ConvertedTokens, dims: int) -> Subspace:
    """Find a subspace of ``dims`` dimensions from a seeded sample of the tokens."""
    seeded = torch.Generator("cpu").manual_seed(0)
    size = min(max(len(rows.tokens) // 24, _SAMPLE[0]), _SAMPLE[1])
    sample = torch.randperm(len(rows.tokens), generator=seeded, device="cpu")[:size]
    tokens_SD = rows.take(sample.numpy()).float()
    return Subspace.of(tokens_SD * inverse_roots(tokens_SD.square().sum(dim=1)).float()[:, None], dims)


class Picks:
    """The selected tokens in order, and their rows, lengths and coordinates: what candidates are compared with."""

    def __init__(self, budget: int, known: Survey) -> None:
        coordinates = known.coordinates
        self.count = 0
        self.order = np.empty(budget, np.int64)
        self.rows = known.rows.tokens.new_empty(budget, known.rows.tokens.shape[1], dtype=known.rows.dtype)
        self.inverse = np.empty(budget)
        self.coordinates = None if coordinates is None else coordinates.new_empty(budget, coordinates.shape[1])
        self._known = known

    def add(self, places: Places) -> None:
        """Append picks, and their rows and coordinates."""
        new = slice(self.count, self.count + len(places))
        self.order[new] = places
        self.rows[new] = self._known.rows.take(places)
        self.inverse[new] = self._known.inverse[places]
        if self.coordinates is not None and self._known.coordinates is not None:
            self.coordinates[new] = self._known.coordinates[torch.from_numpy(places)]
        self.count = new.stop


@dataclass(frozen=True)
class Subspace:
    """The directions in which tokens reach furthest: principal components, uncentred, of a sample.

    Attributes:
        basis: [D,k] float32 with orthonormal columns.
        residual: the mean share of a token's squared length outside, measured on tokens that had no part in it.
    """

    basis: Tensor
    residual: float

    @classmethod
    def of(cls, directions_SD: Tensor, dims: int) -> Subspace:
        """Find a subspace from three of four of these unit tokens [S,D] float32; the rest measure the residual. S >= 4.

        By subspace iteration from random directions, seeded: two steps come within a few percent of the residual of the
        true components, at a fraction of their cost.
        """
        held = torch.arange(len(directions_SD), device="cpu") % 4 == 3
        made_SD, held_SD = directions_SD[~held], directions_SD[held]
        seeded = torch.Generator("cpu").manual_seed(0)
        basis_DK = torch.randn(made_SD.shape[1], dims, generator=seeded, dtype=torch.float32, device="cpu")
        for _ in range(_STEPS):  # each product with X^T X stretches the basis along the principal directions
            basis_DK, _ = torch.linalg.qr(made_SD.T @ (made_SD @ basis_DK))
        outside = held_SD.square().sum(dim=1) - (held_SD @ basis_DK).square().sum(dim=1)
        return cls(basis_DK, float(outside.mean()))

    @property
    def dims(self) -> int:
        """k, the number of the subspace's dimensions."""
        return self.basis.shape[1]

    def coordinates(self, tokens_MD: Tensor, inverse_norm_M: Tensor) -> Tensor:
        """Compute [M,k+1] float32 of which the product of two rows is no less than the cosine, up to MARGIN.

        With x = a + b, a in the subspace and b orthogonal to it: cos(x, y) = a.a' + b.b' <= a.a' + |b||b'|.
        """
        inside_MK = (tokens_MD.float() @ self.basis).mul_(inverse_norm_M[:, None])
        # |b| from Pythagoras: a token has length 1. The error is added, so that the bound is never too low.
        outside_M = (1 - inside_MK.square().sum(dim=1)).clamp_min_(0).add_(_CANCELLED).sqrt_()
        return torch.cat([inside_MK, outside_M[:, None]], dim=1)


def pair_products(a_XD: Tensor, b_YD: Tensor, row: Places, column: Places) -> NDArray[np.floating]:
    """Multiply ``a[row]`` and ``b[column]`` for each pair; ``row`` ascends.

    A product depends on its two rows alone, wherever they stand: copies of a token have the same, bit for bit.
    """
    if not _has_sampled_products():
        return _one_by_one(a_XD, b_YD, row, column)
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


def _one_by_one(a_XD: Tensor, b_YD: Tensor, row: Places, column: Places, block: int = 256) -> NDArray[np.floating]:
    """Multiply the pairs where torch was built without sampled products: several times slower."""
    a_P, b_P, products = torch.from_numpy(row), torch.from_numpy(column), a_XD.new_empty(len(row))
    for start in range(0, len(row), block):
        part = slice(start, start + block)
        products[part] = (a_XD[a_P[part]] * b_YD[b_P[part]]).sum(dim=1)
    together: NDArray[np.floating] = products.numpy()
    return together


@cache
def _has_sampled_products() -> bool:
    """Return whether this build of torch has sampled products, without torch's warning that they are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        try:
            one = torch.ones(1, 1, dtype=torch.float32, device="cpu")
            first, place = torch.tensor([0, 1], device="cpu"), torch.tensor([0], device="cpu")
            pattern = torch.sparse_csr_tensor(first, place, one[0], size=(1, 1), device="cpu", check_invariants=False)
            return bool(torch.sparse.sampled_addmm(pattern, one, one, beta=0.0).values() == 1)
        except RuntimeError:
            return False
