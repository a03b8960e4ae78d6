"""The base of all pruning methods: their contract, the budget, and the checks and packing of their results."""

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
from gstep.pruners.checks import check_evidence, check_integer, check_places, check_tokens
from gstep.selection.precision import full_precision
from gstep.types import PrunedTokens, VisualTokens, budget_for


@dataclass(frozen=True)
class Selection:
    """The result of ``Pruner.select`` among the M = T*N tokens of a video.

    Attributes:
        index: [B] int64 flat indices. The order is the order of selection for a nested method, the order of the
            method's own prompt if it ``reorders``, else free.
        density: [M] rho of every token (Eq. 8), or None.
        temporal_density: [T] (Eq. 7), or None.
        tokens: [B,D] in the order of ``index``, of any float dtype, from a method that changes tokens; None for the
            input's rows.
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
        nested: True if every prefix of the order of ``select`` is the selection of a smaller budget.
        merges: True if some kept tokens are mixtures of input tokens.
        cacheable: True if a selection depends on the video alone, so that it may be stored.
        seeded: True if a selection depends on the seed.
        exact: True if it always keeps B tokens; otherwise its docstring has the rule for the number of tokens.
        reorders: True if its own prompt has the tokens in another order than ascending index.
        optional: the names of evidence that it uses if present.
        family_parameter: the name of the field whose default is the model's family (``ModelFamily.variant``), or None.
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
        """The names of the evidence that the method requires.

        A method in which no parameter changes them declares a class attribute instead.
        """
        return frozenset()

    @property
    def sources(self) -> Mapping[str, str]:
        """The evidence to request from the vision encoder, label -> source (gstep.evidence).

        A class attribute in most methods, like ``needs``.
        """
        return MappingProxyType({})

    @property
    def layer(self) -> int | None:
        """The layer of the language model before which tokens are dropped, counted from 0, at least 1.

        None for a method that prunes before the language model.

        Inside the model the only evidence is ``llm_attention``: the attention of the prompt's last token in the layer
        before. It is averaged over heads and cut to the visual tokens of the prompt. ``select`` gets the hidden states
        of the visual tokens as a single frame, [1,M,D], and seed 0. A method with a layer cannot merge.
        """
        return None

    @abstractmethod
    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select from the tokens [T,N,D] of one video.

        :meth:`prune` calls it with checked arguments, without gradients, outside autocast, with float32 products in
        full precision.

        Args:
            visual: the unconverted tokens, and the evidence of ``needs`` and ``optional`` on their device, in float32
                (float64 stays). ``visual.known_grid`` and ``visual.known_times`` say where and when the tokens are.
            budget: B, in [1, M].
            ratio: the nominal share, or budget / M if a budget was passed: for methods that count frame by frame.
            seed: the seed of methods that draw random numbers.
        """

    def _set(self, **values: Any) -> None:
        """Replace fields by checked values in their canonical type, so that 1 and 1.0 are the same parameter."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def params(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, ready for JSON."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init}

    def nominal_ratio(self, retention_ratio: float) -> float:
        """Return the nominal share of tokens for a requested ``retention_ratio``; a method may have its own rule.

        Raises ValueError outside (0, 1].
        """
        budget_for(retention_ratio, 1)
        return float(retention_ratio)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        """Return the maximum number of tokens that the method keeps of a video [T,N,D], to size a prompt.

        It is B; a method that is not ``exact`` should override it.
        """
        return self.resolve_budget(n_frames * per_frame, retention_ratio)[0]

    def resolve_budget(
        self, n_total: int, retention_ratio: float = 0.25, budget: int | None = None
    ) -> tuple[int, float]:
        """Compute (B, nominal ratio) for a video of ``n_total`` tokens; ``budget``, if any, overrides the ratio."""
        if budget is None:
            ratio = self.nominal_ratio(retention_ratio)
            return budget_for(ratio, n_total), ratio
        count = check_integer("budget", budget, 1, n_total)
        return count, count / n_total

    def prune(
        self, visual: VisualTokens, retention_ratio: float = 0.25, *, budget: int | None = None, seed: int = 0
    ) -> PrunedTokens:
        """Prune one video's tokens [T,N,D] to [B,D] in ascending flat index, on the same device.

        The result does not depend on torch's default dtype and device, nor on the caller's setting for float32
        products.

        Raises:
            ValueError: tokens that are not finite [T,N,D] floats, a ratio outside (0, 1], a budget outside [1, T*N],
                evidence that is not finite floats of the shape that fits the tokens, a grid or times that do not fit.
            MissingEvidence: evidence that the method needs is not in ``visual.evidence``.
            WrongSelection: ``select`` returned an invalid :class:`Selection`: the method has a fault.
        """
        check_tokens(visual.tokens)
        n_frames, per_frame, _ = visual.tokens.shape
        count, ratio = self.resolve_budget(n_frames * per_frame, retention_ratio, budget)
        seed = check_integer("seed", seed, 0)
        if not isinstance(visual.evidence, Mapping):
            raise ValueError(f"evidence must map names to tensors; got {type(visual.evidence).__name__}")
        if missing := sorted(self.needs - visual.evidence.keys()):
            raise MissingEvidence(f"method {self.name!r} needs evidence that is missing: {', '.join(missing)}")
        inputs = {name: visual.evidence[name] for name in sorted(self.needs | self.optional) if name in visual.evidence}
        check_evidence(inputs, n_frames, per_frame)
        check_places(visual.grid, visual.times, n_frames, per_frame)
        with torch.no_grad(), torch.autocast(visual.tokens.device.type, enabled=False), full_precision():
            evidence = {name: value.to(visual.tokens.device, work_dtype(value)) for name, value in inputs.items()}
            selection = self.select(replace(visual, evidence=evidence), count, ratio, seed)
            return self.pack_selection(visual.tokens, selection, count, ratio)

    def pack_selection(self, tokens_TND: Tensor, selection: Selection, budget: int, ratio: float) -> PrunedTokens:
        """Check what ``select`` returned for these tokens, and gather the kept tokens in ascending index.

        Raises WrongSelection.
        """
        self._check_selection(selection, tokens_TND, budget)
        return self._pack_tokens(tokens_TND, selection, ratio)

    def _check_selection(self, selection: Selection, tokens_TND: Tensor, budget: int) -> None:
        """Raise WrongSelection, naming the method, unless types and shapes fit these tokens and no token is NaN."""
        if not isinstance(selection, Selection):
            raise WrongSelection(f"method {self.name!r} must return a Selection; got {type(selection).__name__}")
        n_frames, per_frame, hidden = tokens_TND.shape
        n_total, index = n_frames * per_frame, selection.index
        n_kept = budget if self.exact or not isinstance(index, Tensor) else max(1, index.numel())
        shapes = {"index": [n_kept], "tokens": [n_kept, hidden], "merged": [n_kept]}
        for name, shape in {**shapes, "density": [n_total], "temporal_density": [n_frames]}.items():
            value = getattr(selection, name)
            actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if actual != shape and (value is not None or name == "index"):
                raise WrongSelection(f"method {self.name!r} must return {name} as a tensor {shape}; got {actual}")
        if selection.tokens is not None and selection.tokens.isnan().any():
            raise WrongSelection(f"method {self.name!r} must not return tokens that are NaN")

    def _pack_tokens(self, tokens_TND: Tensor, selection: Selection, ratio: float) -> PrunedTokens:
        """Sort a selection by index and gather its tokens; the sort's permutation is the rank of each kept token.

        Raises WrongSelection, naming the method, if indices repeat or lie outside of the video.
        """
        index_B, rank_B = torch.sort(selection.index.long(), stable=True)
        n_frames, per_frame, hidden = tokens_TND.shape
        n_total = n_frames * per_frame
        if (index_B.diff() == 0).any() | (index_B[0] < 0) | (index_B[-1] >= n_total):
            raise WrongSelection(f"method {self.name!r} must return different indices in [0, {n_total}) as index")
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
