"""The base of all pruning methods: the contract, the budget, and the packing of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from gstep.density import work_dtype
from gstep.errors import MissingEvidence, WrongSelection
from gstep.pruners.checks import check_evidence, check_integer, check_tokens
from gstep.selection.precision import full_precision
from gstep.types import PrunedTokens, VisualTokens, budget_for


@dataclass(frozen=True)
class Selection:
    """The choice of a method among the M = T*N tokens of a video.

    Attributes:
        index: [B] int64 flat indices; in order of selection for a nested method, in the order of its own prompt for one
            that reorders, in any order for another one.
        density: [M] rho of every token (Eq. 8), or None.
        temporal_density: [T] (Eq. 7), or None.
        tokens: [B,D] in the order of ``index``, of any float dtype, from a method that changes tokens; None means the
            input's own rows.
        merged: [B] bool in the order of ``index``, from a method that merges; else None.
    """

    index: Tensor
    density: Tensor | None = None
    temporal_density: Tensor | None = None
    tokens: Tensor | None = None
    merged: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Pruner(ABC):
    """A pruning method: its fields are its hyper-parameters (checked on construction), ``select`` its mathematics.

    Class attributes:
        name: its name in the table of methods.
        nested: whether ``select`` returns an order in which every prefix is the selection of a smaller budget.
        merges: whether some of its tokens are mixtures of input tokens.
        cacheable: whether a selection depends on the video alone, so that it may be stored.
        seeded: whether a selection depends on the seed.
        exact: whether it keeps B tokens always; one that does not comes near by a rule of its own, see its docstring.
        reorders: whether its own prompt has the tokens in another order than ascending index.
        optional: the names of the evidence that it takes where it is given.
        family_parameter: the name of the field, if any, that takes the model family's rules (``Backbone.variant``)
            where nothing else is said.
    """

    name: ClassVar[str]
    nested: ClassVar[bool]
    merges: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True
    seeded: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    reorders: ClassVar[bool] = False
    optional: ClassVar[frozenset[str]] = frozenset()
    family_parameter: ClassVar[str | None] = None

    @property
    def needs(self) -> frozenset[str]:
        """The evidence that the method cannot do without.

        A class attribute where parameters make no difference.
        """
        return frozenset()

    @property
    def sources(self) -> Mapping[str, str]:
        """The evidence that a vision encoder gives, by label, and from where in the encoder (gstep.evidence).

        As ``needs``, a class attribute in most methods.
        """
        return MappingProxyType({})

    @property
    def layer(self) -> int | None:
        """The layer of the language model before which tokens are dropped.

        Counted from 0 and at least 1; None for a method that chooses among the tokens before they go in.

        Inside of the model there is ``llm_attention`` and nothing else: the row of the prompt's last token in the layer
        before, averaged over heads and cut to the visual tokens of the prompt. ``select`` gets these as one frame of M
        tokens, [1,M,D] as that layer sees them. Nothing can be merged there.
        """
        return None

    @abstractmethod
    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Choose from the tokens [T,N,D].

        Called without gradients and outside autocast, float32 multiplied in full precision, with checked arguments.

        Args:
            visual: the tokens as they came, and the evidence that was asked for, on the tokens' device, in float32
                (float64 where it was float64).
            budget: B, in [1, M].
            ratio: the share asked for, or budget / M where a budget was: for methods that count frame by frame.
            seed: for methods that draw.
        """

    def _set(self, **values: Any) -> None:
        """Store checked values in their canonical type, so that 1 and 1.0 are the same parameter."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def params(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, ready for JSON."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init}

    def nominal_ratio(self, retention_ratio: float) -> float:
        """Return the share of tokens that this method keeps when asked for ``retention_ratio``.

        Raises ValueError outside (0, 1].
        """
        budget_for(retention_ratio, 1)
        return float(retention_ratio)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        """Return the most tokens that the method keeps of a video [T,N,D], for which a prompt must have room.

        That is B, unless the method says otherwise here: one that is not ``exact`` should.
        """
        return self.resolve_budget(n_frames * per_frame, retention_ratio)[0]

    def resolve_budget(
        self, n_total: int, retention_ratio: float = 0.25, budget: int | None = None
    ) -> tuple[int, float]:
        """Return B and the nominal ratio for a video of ``n_total`` tokens; a given ``budget`` overrides the ratio."""
        if budget is None:
            ratio = self.nominal_ratio(retention_ratio)
            return budget_for(ratio, n_total), ratio
        kept = check_integer("budget", budget, 1, n_total)
        return kept, kept / n_total

    def prune(
        self, visual: VisualTokens, retention_ratio: float = 0.25, *, budget: int | None = None, seed: int = 0
    ) -> PrunedTokens:
        """Prune one video's tokens [T,N,D]; the kept ones [B,D] come in ascending flat index, on the same device.

        torch's defaults of dtype and device, and what a caller allows for float32 products, change nothing of it; the
        encoder that made the tokens follows them.

        Raises:
            ValueError: tokens that are not finite [T,N,D] floats, a ratio outside (0, 1], a budget outside [1, T*N],
                evidence that is not finite floats of the shape that fits the tokens.
            MissingEvidence: evidence that the method needs is not in ``visual.evidence``.
            WrongSelection: ``select`` returned something else than :class:`Selection` says: the method is wrong.
        """
        check_tokens(visual.tokens)
        n_frames, per_frame, _ = visual.tokens.shape
        kept, ratio = self.resolve_budget(n_frames * per_frame, retention_ratio, budget)
        seed = check_integer("seed", seed, 0)
        if not isinstance(visual.evidence, Mapping):
            raise ValueError(f"evidence must map names to tensors; got {type(visual.evidence).__name__}")
        if missing := sorted(self.needs - visual.evidence.keys()):
            raise MissingEvidence(f"method {self.name!r} needs evidence that was not given: {', '.join(missing)}")
        taken = {name: visual.evidence[name] for name in sorted(self.needs | self.optional) if name in visual.evidence}
        check_evidence(taken, n_frames, per_frame)
        with torch.no_grad(), torch.autocast(visual.tokens.device.type, enabled=False), full_precision():
            evidence = {name: value.to(visual.tokens.device, work_dtype(value)) for name, value in taken.items()}
            selection = self.select(replace(visual, evidence=evidence), kept, ratio, seed)
            self._check(selection, visual.tokens, kept)
            return self._pack(visual.tokens, selection, ratio)

    def _check(self, selection: Selection, tokens_TND: Tensor, kept: int) -> None:
        """Raise WrongSelection, naming the method, unless ``select`` returned what Selection says for these tokens."""
        if not isinstance(selection, Selection):
            raise WrongSelection(f"method {self.name!r} must return a Selection; got {type(selection).__name__}")
        n_frames, per_frame, hidden = tokens_TND.shape
        n_total, index = n_frames * per_frame, selection.index
        n_kept = kept if self.exact or not isinstance(index, Tensor) else max(1, index.numel())
        shapes = {"index": [n_kept], "tokens": [n_kept, hidden], "merged": [n_kept]}
        for name, shape in {**shapes, "density": [n_total], "temporal_density": [n_frames]}.items():
            value = getattr(selection, name)
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if found != shape and (value is not None or name == "index"):
                raise WrongSelection(f"method {self.name!r} must return {name} as a tensor {shape}; got {found}")
        if selection.tokens is not None and selection.tokens.isnan().any():
            raise WrongSelection(f"method {self.name!r} must not return tokens that are NaN")

    def _pack(self, tokens_TND: Tensor, selection: Selection, ratio: float) -> PrunedTokens:
        """Sort a selection by index; the sort's permutation is the rank of each kept token.

        Raises WrongSelection, naming the method, where places repeat or lie outside of the video.
        """
        index_B, rank_B = torch.sort(selection.index.long(), stable=True)
        n_frames, per_frame, hidden = tokens_TND.shape
        n_total = n_frames * per_frame
        if (index_B.diff() == 0).any() | (index_B[0] < 0) | (index_B[-1] >= n_total):
            raise WrongSelection(f"method {self.name!r} must return different places in [0, {n_total}) as index")
        if selection.tokens is None:
            tokens_BD = tokens_TND.reshape(-1, hidden).index_select(0, index_B)
        else:
            # A sum beyond the range of 16 bits becomes their largest number instead of infinity.
            largest = torch.finfo(tokens_TND.dtype).max
            tokens_BD = selection.tokens.index_select(0, rank_B).clamp(-largest, largest).to(tokens_TND.dtype)
        density_M, temporal_T = selection.density, selection.temporal_density
        return PrunedTokens(
            tokens=tokens_BD,
            index=index_B,
            rank=rank_B if self.nested else None,
            merged=None if selection.merged is None else selection.merged.index_select(0, rank_B),
            order=torch.argsort(rank_B) if self.reorders else None,
            n_total=n_total,
            retention_ratio=ratio,
            density=None if density_M is None else density_M.index_select(0, index_B).float(),
            temporal_density=None if temporal_T is None else temporal_T.float(),
        )
