"""The base class of all pruning methods: their contract, the budget, and the checks of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from gstep.density import get_work_dtype
from gstep.errors import MissingEvidence, WrongSelection
from gstep.pruners.checks import check_evidence, check_grid_and_times, check_integer, check_tokens
from gstep.selection.precision import use_full_precision
from gstep.types import PrunedTokens, VisualTokens, budget_for


@dataclass(frozen=True)
class Selection:
    """The tokens that ``Pruner.select`` keeps among the M = T*N tokens of a video.

    Attributes:
        index: [B] flat indices t*N + i without repetitions, in the order of selection for a nested method, in the order
            of the method's own prompt if it ``reorders``, otherwise in any order.
        density: [M], rho of every token (Eq. 8); None if the method has none.
        temporal_density: [T] (Eq. 7); None if the method has none.
        tokens: [B,D] in the order of ``index``, of any float dtype; None to keep the input's rows unchanged.
        merged: [B] bool in the order of ``index``, True for merged tokens; None if the method never merges.
    """

    index: Tensor
    density: Tensor | None = None
    temporal_density: Tensor | None = None
    tokens: Tensor | None = None
    merged: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Pruner(ABC):
    """A pruning method: the fields of the dataclass are its hyper-parameters, and ``select`` computes the selection.

    A subclass is a frozen dataclass that declares ``name`` and ``nested``, and checks its parameters in
    ``__post_init__``.

    Class attributes:
        nested: True if, for every smaller budget, the selection is the beginning of this one in the order of
            ``select``.
        merges: True if some kept tokens are mixtures of input tokens.
        cacheable: True if the selection depends only on the video, so that it can be stored.
        seeded: True if the selection depends on the seed.
        exact: True if the method always keeps B tokens. Otherwise the class docstring gives the rule.
        reorders: True if the method's own prompt has the tokens in another order than ascending index.
        optional: The names of evidence that the method uses if it is given.
        family_parameter: The name of the field whose default is the model's family (``ModelFamily.variant``), or None.
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
        """The names of the evidence that the method requires; a class attribute in methods without such parameters."""
        return frozenset()

    @property
    def sources(self) -> Mapping[str, str]:
        """The evidence to request from the vision encoder, label -> source (gstep.evidence)."""
        return MappingProxyType({})

    @property
    def layer(self) -> int | None:
        """The layer of the language model before which tokens are dropped, from 1 on (0 is the first layer).

        None for a method that prunes before the language model.

        For a method with a layer, ``select`` gets the hidden states of the visual tokens as one frame, [1,M,D], the
        seed 0, and only the evidence ``llm_attention``: the attention of the prompt's last token to the visual tokens
        in the previous layer, averaged over heads. Such a method cannot merge tokens.
        """
        return None

    @abstractmethod
    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Select from the tokens [T,N,D] of one video, without modifying the arguments.

        :meth:`prune` calls it with checked arguments, without gradients, outside autocast, and with float32 products in
        full precision.

        Args:
            visual: The tokens in their original dtype, and the evidence of ``needs`` and ``optional`` on the tokens'
                device, in float32 (or float64 if it was given so). ``visual.known_grid`` and ``visual.known_times``
                give positions and times.
            budget: B, in [1, M].
            ratio: The nominal ratio, or budget / M if a budget was given, for methods that count frame by frame.
            seed: A non-negative integer.
        """

    def _set(self, **values: Any) -> None:
        """Replace fields of this frozen object by checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def params(self) -> dict[str, Any]:
        """Return the hyper-parameters by name; those of the built-in methods are JSON values."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init}

    def nominal_ratio(self, retention_ratio: float) -> float:
        """Return the nominal ratio for a requested ratio, by default the same; raise ValueError outside (0, 1]."""
        budget_for(retention_ratio, 1)
        return float(retention_ratio)

    def at_most(self, n_frames: int, per_frame: int, hidden: int, retention_ratio: float) -> int:
        """Return the maximum number of tokens that the method keeps of a video [T,N,D], to reserve room in a prompt.

        The default is B; methods that are not ``exact`` should override it. ``hidden`` is D.
        """
        return self.resolve_budget(n_frames * per_frame, retention_ratio)[0]

    def resolve_budget(
        self, n_total: int, retention_ratio: float = 0.25, budget: int | None = None
    ) -> tuple[int, float]:
        """Compute (B, nominal ratio) for a video of ``n_total`` tokens.

        If ``budget`` is given, it is B, and the nominal ratio is B / n_total whatever ``retention_ratio`` is.

        Raises:
            ValueError: ``budget`` is not an integer in [1, n_total], or ``retention_ratio`` is not in (0, 1].
        """
        if budget is None:
            ratio = self.nominal_ratio(retention_ratio)
            return budget_for(ratio, n_total), ratio
        count = check_integer("budget", budget, 1, n_total)
        return count, count / n_total

    def prune(
        self, visual: VisualTokens, retention_ratio: float = 0.25, *, budget: int | None = None, seed: int = 0
    ) -> PrunedTokens:
        """Prune one video's tokens [T,N,D] to [B,D] in ascending flat index, on the same device and without gradients.

        The result does not depend on torch's default dtype and device or on its precision setting for float32 products.

        Args:
            visual: The tokens, with the evidence, grid and times that the method uses. Other evidence and deepstack
                vectors are ignored.
            retention_ratio: The share of tokens to keep; ignored if ``budget`` is given.
            budget: B itself, in [1, T*N].
            seed: A non-negative integer.

        Raises:
            ValueError: The tokens are not finite [T,N,D] floats, the ratio, budget or seed is out of range, or
                evidence, grid or times do not fit the tokens.
            MissingEvidence: ``visual.evidence`` lacks evidence that the method needs.
            WrongSelection: ``select`` returned an invalid :class:`Selection`. Errors that ``select`` raises are passed
                on.
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
        check_grid_and_times(visual.grid, visual.times, n_frames, per_frame)
        with torch.no_grad(), torch.autocast(visual.tokens.device.type, enabled=False), use_full_precision():
            evidence = {name: value.to(visual.tokens.device, get_work_dtype(value)) for name, value in inputs.items()}
            selection = self.select(replace(visual, evidence=evidence), count, ratio, seed)
            return self.pack_selection(visual.tokens, selection, count, ratio)

    def pack_selection(self, tokens_TND: Tensor, selection: Selection, budget: int, ratio: float) -> PrunedTokens:
        """Check what ``select`` returned for these tokens, and gather the kept tokens in ascending index.

        Args:
            budget: B, the number of tokens that an ``exact`` method must return.
            ratio: The nominal ratio to record.

        Raises:
            WrongSelection: A type or shape is wrong, tokens are NaN, or indices repeat or lie outside [0, T*N).
        """
        self._check_selection(selection, tokens_TND, budget)
        return self._pack_tokens(tokens_TND, selection, ratio)

    def _check_selection(self, selection: Selection, tokens_TND: Tensor, budget: int) -> None:
        """Raise WrongSelection unless this is a Selection of tensors whose shapes fit these tokens and no token is NaN.

        Dtypes and the values of the indices are not checked. A method that is not ``exact`` may return one token or
        more.
        """
        if not isinstance(selection, Selection):
            raise WrongSelection(f"method {self.name!r} must return a Selection; got {type(selection).__name__}")
        n_frames, per_frame, hidden = tokens_TND.shape
        n_total = n_frames * per_frame
        index = selection.index
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
        """Sort a selection by index, and gather its tokens and densities; raise WrongSelection for invalid indices.

        ``rank`` is set only if the method is nested, ``order`` only if it ``reorders``. Tokens that ``select`` returned
        get the input's dtype; values beyond its range become its largest finite value. Densities become float32.
        """
        index_B, rank_B = torch.sort(selection.index.long(), stable=True)
        n_frames, per_frame, hidden = tokens_TND.shape
        n_total = n_frames * per_frame
        if (index_B.diff() == 0).any() | (index_B[0] < 0) | (index_B[-1] >= n_total):
            raise WrongSelection(f"method {self.name!r} must return different indices in [0, {n_total}) as index")
        if selection.tokens is None:
            tokens_BD = tokens_TND.reshape(-1, hidden).index_select(0, index_B)
        else:
            # A sum beyond the range of a 16-bit dtype becomes its largest number instead of infinity.
            largest = torch.finfo(tokens_TND.dtype).max
            tokens_BD = selection.tokens.index_select(0, rank_B).clamp(-largest, largest).to(tokens_TND.dtype)
        density_M = selection.density
        temporal_T = selection.temporal_density
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
