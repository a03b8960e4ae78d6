"""Live pruning in vLLM: its settings, and the positions of kept tokens. This module does not need vLLM.

Shapes: T temporal patches, N tokens per patch, M = T*N; S prompt tokens of one video or image.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gstep.backbones import family_class
from gstep.checkpoints.source import ModelSource
from gstep.errors import ModelError
from gstep.families import describe_family
from gstep.lazy import format_suggestion
from gstep.methods import LIVE_METHODS, METHODS
from gstep.pruners import find_method, make_pruner, read_pruner
from gstep.pruners.base import Pruner
from gstep.serving import LIVE_ARCHITECTURES
from gstep.types import VisualTokens

#: The key of the settings in the model's configuration, where ``hf_overrides`` puts them for all vLLM processes.
LIVE = "live_pruning"
_STOCK_METHODS = ("evs", "vidcom2")  # of vLLM's own --video-pruning-method
_BASE = 128  # of digits, which every dtype of rows then represents exactly
#: Columns appended to a row: three digits for each of t, h, w and the row's number.
DIGIT_COLUMNS = 12


@dataclass(frozen=True)
class LivePruning:
    """The settings of live pruning.

    The server creates them; every vLLM process reads them from the model's configuration.

    Attributes:
        method: a name that ``check_live_method`` accepts.
        retention_ratio: the share of a video's tokens to keep, in (0, 1).
        params: the method's hyper-parameters.
    """

    method: str = "gstep"
    retention_ratio: float = 0.25
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @classmethod
    def from_config(cls, config: Any) -> LivePruning:
        """Read the settings from the model configuration in a vLLM process."""
        return cls(**getattr(config, LIVE))

    @classmethod
    def from_texts(
        cls, source: ModelSource, method: str, texts: Mapping[str, str], retention_ratio: float, seed: int
    ) -> LivePruning:
        """Create the settings from hyper-parameters given as text, and check them, but not the ratio and seed.

        Raises:
            ModelError: vLLM does not prune this model's videos, or the method cannot prune in vLLM.
            ValueError: a hyper-parameter is unknown or has a bad value.
        """
        check_live_model(source)
        check_live_method(method, retention_ratio)
        pruner = read_pruner(method, texts, family=family_class(source.family).variant)
        return cls(method, retention_ratio, pruner.params(), seed)

    def as_options(self) -> dict[str, Any]:
        """Return the settings as JSON values for ``LivePruning(**options)``."""
        return {**asdict(self), "params": dict(self.params)}

    @cached_property
    def name(self) -> str:
        """A hash of the settings, which keeps differently pruned videos apart in vLLM's caches."""
        return hashlib.sha256(json.dumps(self.as_options(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def rate(self) -> float:
        """The share of tokens to drop, inside (0, 1), which is vLLM's ``video_pruning_rate``."""
        return min(max(round(1.0 - self.retention_ratio, 9), 1e-9), 1.0 - 1e-9)

    @cached_property
    def pruner(self) -> Pruner:
        """The method with its hyper-parameters."""
        return make_pruner(self.method, **self.params)

    def budget(self, n_total: int) -> int:
        """Compute the number of kept tokens of a video."""
        return self.pruner.resolve_budget(n_total, self.retention_ratio)[0]

    def select_mask(self, tokens_TND: Tensor) -> Tensor:
        """Select a video's kept tokens: a bool mask [T*N] on the tokens' device with ``budget`` True values.

        The method gets the tokens in bfloat16. NaN and infinite values become 0, because an error here would stop the
        engine.
        """
        finite = tokens_TND.detach().to(torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
        pruned = self.pruner.prune(VisualTokens(finite, {}), self.retention_ratio, seed=self.seed)
        mask = torch.zeros(len(tokens_TND) * tokens_TND.shape[1], dtype=torch.bool, device=tokens_TND.device)
        mask[pruned.index.to(mask.device)] = True
        return mask


def check_live_method(method: str, retention_ratio: float) -> None:
    """Raise ModelError, with the reason, if a method cannot prune in vLLM or does not exist.

    ``retention_ratio`` is suggested in the message for vLLM's own methods.
    """
    if method in LIVE_METHODS:
        return
    others = f"methods that prune in vLLM: {', '.join(LIVE_METHODS)}"
    if method in _STOCK_METHODS:
        raise ModelError(
            f"--method {method}: vLLM has this method itself: vllm serve MODEL --video-pruning-method {method} "
            f"--video-pruning-rate {round(1.0 - retention_ratio, 9):g}; {others}"
        )
    if ":" in method:
        raise ModelError(f"--method {method}: methods of your own are not tested in vLLM; {others}")
    if method not in METHODS:
        raise ModelError(f"--method {method}: there is no such method{format_suggestion(method, METHODS)}; {others}")
    raise ModelError(f"--method {method}: it {find_live_obstacle(find_method(method))}; {others}")


def find_live_obstacle(kind: type[Pruner]) -> str | None:
    """Return the first reason why a method cannot prune in vLLM, such as "merges tokens"; None if it can."""
    pruner = kind()
    if not pruner.cacheable:
        return "looks at the question, which vLLM's encoder does not see"
    if pruner.needs:
        return f"needs evidence that vLLM's encoder does not give ({', '.join(sorted(pruner.needs))})"
    if pruner.merges:
        return "merges tokens"
    if not pruner.exact:
        return "keeps a number of tokens that is not known before a video is encoded"
    return "keeps all tokens" if pruner.name == "none" else None


def check_live_model(source: ModelSource) -> None:
    """Raise ModelError unless vLLM can prune this model's videos: a Qwen type, read by the family of that type."""
    if source.model_type not in LIVE_ARCHITECTURES or source.family != source.model_type:
        raise ModelError(
            f"{source.name!r}: vLLM has no pruning for {describe_family(source.family, source.model_type)}, only for "
            f"{', '.join(LIVE_ARCHITECTURES)}. Prune with python -m jobs.prune, and serve the cache with python -m "
            "jobs.serve CACHE"
        )


def encode_digits(positions: Tensor) -> Tensor:
    """Encode the positions of rows as 12 columns [S,12], to be appended to the rows on their way through vLLM.

    vLLM keeps positions in the dtype of the rows, and bfloat16 rounds integers above 256. So each of t, h, w and the
    row's number becomes three digits in base 128: first all high, then all middle, then all low digits.

    Args:
        positions: [S,3], counted from the start of the video or image, below 128^3.
    """
    numbers = torch.arange(len(positions), device=positions.device)
    values = torch.cat([positions, numbers[:, None]], dim=1)
    return torch.cat([values // _BASE**2, values // _BASE % _BASE, values % _BASE], dim=1)


def decode_digits(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the columns of ``encode_digits`` to positions [S,3] and row numbers [S], int64."""
    high, middle, low = columns.long().chunk(3, dim=1)
    values = (high * _BASE + middle) * _BASE + low
    return values[:, :3], values[:, 3]


def compute_grid_positions(n_frames: int, height: int, width: int, step: float = 1.0) -> Tensor:
    """Compute the positions (t, h, w) of a grid of tokens in row order, [M,3] int64.

    Args:
        step: positions per temporal patch; times are truncated to integers.
    """
    times = (torch.arange(n_frames, device="cpu") * torch.tensor(step, device="cpu")).long()
    rows, columns = torch.arange(height, device="cpu"), torch.arange(width, device="cpu")
    return torch.cartesian_prod(times, rows, columns)


def compute_timed_positions(is_visual: Tensor, is_start: Tensor, index: Tensor, height: int, width: int) -> Tensor:
    """Compute the positions [S,3] of a video whose prompt has a text with the time before each temporal patch.

    Each patch takes max(height, width) positions, no matter how many of its tokens are kept; each text token takes one.
    In a patch that starts at position p, a kept token has (p, p + row, p + column).

    Args:
        is_visual: [S], True for kept tokens, False for text.
        is_start: [S], True for the start marker before each patch's kept tokens.
        index: the flat indices of the kept tokens, ascending.
        height, width: the grid of a patch in tokens.
    """
    n_text = (~is_visual).long().cumsum(0) - (~is_visual).long()  # before each token
    n_starts = is_start.long().cumsum(0) - is_start.long()
    extent = max(height, width)
    positions = (n_text + extent * n_starts)[:, None].repeat(1, 3)
    in_patch = index % (height * width)
    positions[is_visual] -= extent
    positions[is_visual, 1] += in_patch // width
    positions[is_visual, 2] += in_patch % width
    return positions


def update_positions(positions: Tensor, parts: list[Tensor], starts: list[int], n_computed: int) -> Tensor:
    """Return a copy of a prompt's positions [3,L], updated with the positions that a step's rows carry.

    A slice whose first row is not row 0 continues a video or image from the step before, at ``n_computed``; any other
    begins at the next start. Positions count from the one after the token before the video or image.

    Args:
        positions: [3,L], already right for text.
        parts: in prompt order, the columns of ``encode_digits`` for each slice of a video or image in the step. An
            empty slice, and one that does not fit the prompt, is skipped.
        starts: the first prompt token of each video and image, ascending.
        n_computed: the first prompt token of the step.
    """
    new_positions = positions.clone()
    end = n_computed
    for columns in parts:
        values, numbers = decode_digits(columns.to(positions.device))
        if not len(numbers):
            continue
        first = int(numbers[0])
        start = n_computed - first if first else next((index for index in starts if index >= end), None)
        if start is None or start < 0 or start + int(numbers[-1]) >= positions.shape[1]:
            continue  # guessed starts may be wrong, and an error would stop the engine
        base = int(positions[:, start - 1].max()) + 1 if start else 0
        new_positions[:, start + numbers] = (values.T + base).to(new_positions.dtype)
        end = start + int(numbers[-1]) + 1
    return new_positions


class PromptStarts:
    """A bounded memory of where the videos and images of recent prompts start."""

    def __init__(self, max_prompts: int = 4096) -> None:
        self._starts: OrderedDict[bytes, list[int]] = OrderedDict()
        self._max_prompts = max_prompts

    def store(self, ids: Tensor, starts: list[int]) -> None:
        """Remember the starts of a prompt; beyond ``max_prompts``, forget the prompt that was stored first."""
        self._starts[_hash_ids(ids)] = starts
        if len(self._starts) > self._max_prompts:
            self._starts.popitem(last=False)

    def find(self, ids: Tensor) -> list[int] | None:
        """Return the stored starts of a prompt; None if they are unknown."""
        return self._starts.get(_hash_ids(ids))


def _hash_ids(ids: Tensor) -> bytes:
    """Return a hash of a prompt's token ids."""
    return hashlib.sha256(ids.long().numpy().tobytes()).digest()


def find_runs(ids: Tensor, token_id: int) -> list[int]:
    """Return the index of the first token of each run of consecutive ``token_id`` in a prompt, ascending."""
    is_token = ids == token_id
    is_first = is_token.clone()
    is_first[1:] &= ~is_token[:-1]
    return is_first.nonzero()[:, 0].tolist()
