"""The tokens of a video as gstep.selection.lazy needs them: rows, lengths and coordinates, and those of its picks.

Shapes: M tokens, D hidden size, B budget, k dimensions of the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep.density import row_factors, scaled_rows, work_dtype, working_scale
from gstep.selection.products import Places
from gstep.selection.reference import inverse_roots
from gstep.selection.subspace import Subspace

Floats = NDArray[np.float64]

_SAMPLE = (384, 2048)  # fewest and most tokens of the sample that the subspace is made of, else one token in 24
_NO_SUBSPACE = 0.95  # above this residual the bound tells nothing about two tokens
_FAINT = 2.0**-80  # squared lengths below it may be lost in float32
_CHUNK = 2**19  # elements of tokens that stay in a core's cache


@dataclass(frozen=True)
class Rows:
    """Tokens of any float dtype; converted to their work dtype and scaled a few at a time, so no whole copy exists.

    Attributes:
        factor: [M], see gstep.density.row_factors; None where no row needs one.
    """

    tokens: Tensor
    factor: Tensor | None

    @classmethod
    def of(cls, tokens: Tensor) -> Rows:
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

    rows: Rows
    inverse: Floats
    coordinates: Tensor | None
    has_copies: bool


def survey(rows: Rows, dims: int | None = None) -> Survey:
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


def _subspace(rows: Rows, dims: int) -> Subspace:
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
