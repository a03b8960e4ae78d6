"""What the benchmark of efficiency is asked for, checked against the model before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gstep.backbones import ModelSource, Runtime, choose_runtime
from gstep.checkpoints.random_weights import without_weights
from gstep.evidence import HEAD_SOURCES
from gstep.language import PromptBuilder, prompt_builder
from pipeline.errors import UsageError
from pipeline.execution.request import refusing
from pipeline.generate.late_pruning import LatePruning, asked_grid, late_pruning
from pipeline.inputs.manifest import read_manifest
from pipeline.prune.config import PruneConfig
from pipeline.prune.request import PruneRequest, needed_by, resolve
from pipeline.rows import ManifestRow
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore

FULL = "none"


@dataclass(frozen=True)
class KvShape:
    """The shape of a language model's keys for one token; the values have the same shape again."""

    layers: int
    kv_heads: int
    head_dim: int
    number_bytes: int

    @classmethod
    def of(cls, text_config: Any, dtype: torch.dtype) -> KvShape:
        """Read the shape from the language model's part of a stock configuration."""
        width = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
        return cls(text_config.num_hidden_layers, text_config.num_key_value_heads, int(width), dtype.itemsize)

    def n_bytes(self, tokens: int, *, layer: int = 0, kept: int | None = None) -> int:
        """Return the bytes of keys and values of ``tokens``, of which only ``kept`` remain from ``layer`` on."""
        places = layer * tokens + (self.layers - layer) * (tokens if kept is None else kept)
        return places * self.kv_heads * self.head_dim * 2 * self.number_bytes


@dataclass(frozen=True)
class Arm:
    """A pruning method at a retention ratio; ``late`` is its pruning of cached tokens, None for full retention."""

    method: str
    retention_ratio: float
    late: LatePruning | None = None

    @property
    def label(self) -> str:
        """The method at its ratio, ``method@ratio``."""
        return f"{self.method}@{self.retention_ratio:g}"

    @property
    def evidence(self) -> frozenset[str]:
        """The evidence that the encoder gives besides tokens, by label."""
        return frozenset() if self.late is None else frozenset(column for _, column in self.late.evidence)

    @property
    def held(self) -> list[str]:
        """The evidence that the arm's cache holds besides tokens."""
        return [] if self.stored else sorted(self.evidence)

    @property
    def stored(self) -> bool:
        """Whether the arm's cache stores only the kept tokens; otherwise each question selects from all stored ones."""
        return self.late is not None and self.late.inside is None and self.late.pruner.cacheable

    def dropped_inside(self, n_visual: int) -> tuple[int, int]:
        """Return the LLM layer before which visual tokens are dropped, and how many; (0, 0) where none are."""
        if self.late is None or self.late.inside is None:
            return 0, 0
        return self.late.pruner.layer or 0, n_visual - self.late.kept_inside(n_visual)


@dataclass(frozen=True)
class Job:
    """The arms, videos and settings of a measurement.

    Attributes:
        request: all tokens of the videos, with the evidence that any of the methods looks at.
        arms: full retention first.
        random: whether the weights are.
    """

    request: PruneRequest
    runtime: Runtime
    builder: PromptBuilder
    arms: tuple[Arm, ...]
    questions: int
    max_new_tokens: int
    repeats: int
    random: bool

    @property
    def kv(self) -> KvShape:
        """The shape of the language model's keys and values."""
        return KvShape.of(self.builder.config.get_text_config(), self.runtime.dtype)

    @property
    def videos(self) -> list[ManifestRow]:
        """The rows of the manifest."""
        found: list[ManifestRow] = self.request.manifest.to_pylist()
        return found


def prepare(
    folder: Path,
    *,
    model: str,
    random_weights: bool,
    siglip: str | None,
    videos: str,
    num_frames: int,
    methods: Sequence[str],
    ratios: Sequence[float],
    questions: int,
    max_new_tokens: int,
    repeats: int,
    device: str,
    dtype: str,
    attn: str,
) -> Job:
    """Find the model, its frames and the methods. Raises UsageError, with the remedy, where one cannot be used."""
    with refusing():
        runtime = choose_runtime(device, dtype, attn)
        random = random_weights or without_weights(model)
        source = _random(model, folder / "model") if random else ModelSource.resolve(model)
        asked = [one for one in asked_grid(methods, ratios, siglip) if one.method != FULL]
        pairs = {pair for one in asked for pair in needed_by(one.method, source.model_type, one.params)}
        _check_siglip(siglip, {where for _, where in pairs})
        config = PruneConfig(
            videos=[videos],
            out=str(folder),
            model=model,
            siglip=siglip,
            pruner=FULL,
            retention_ratio=1.0,
            evidence=[f"{name}={where}" for name, where in sorted(pairs)],
            num_frames=num_frames,
            attn=attn,
        )
        request = resolve(config, read_manifest(videos), LocalStore(folder), Objects.from_environment(), source)
        builder, held = prompt_builder(request.source), request.identity(runtime.dtype_name)
        late = [late_pruning(one, held, request.source, builder) for one in asked]
        arms = [Arm(one.method_label, one.retention_ratio, how) for one, how in zip(asked, late, strict=True)]
    return Job(request, runtime, builder, (Arm(FULL, 1.0), *arms), questions, max_new_tokens, repeats, random)


def _random(model: str, folder: Path) -> ModelSource:
    """Return the model with random weights, its small files written to the new ``folder``."""
    folder.mkdir()
    return ModelSource.random(model, folder)


def _check_siglip(siglip: str | None, sources: set[str]) -> None:
    """Raise UsageError if a SigLIP checkpoint was given that no method takes evidence from."""
    if siglip is not None and not sources & HEAD_SOURCES:
        raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
