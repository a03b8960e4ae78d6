"""Model families, one a file, and what the pipeline needs of them.

The order of use: :class:`ModelSource.resolve` on the driver says what a model argument means, without any weights;
:func:`preprocessor_for` gives decode processes what they need; :func:`load_static` gives the driver the few weights
that a cache header holds; :func:`load_backbone` builds the vision part on a GPU. Everything else is imported when it
is first used, so that importing this package loads neither transformers nor safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gstep.families import FAMILIES
from gstep.lazy import LazyTable

if TYPE_CHECKING:
    from gstep.backbones.base import Backbone, SampledVideo, StaticParts
    from gstep.backbones.preprocess.base import Preprocessor
    from gstep.backbones.runtime import Runtime, choose_runtime
    from gstep.backbones.siglip.text import TextTower, TextTowerSource
    from gstep.checkpoints.source import ModelSource
    from gstep.checkpoints.tensors import read_tensors

BACKBONES = LazyTable("model type", {name: family.backbone for name, family in FAMILIES.items()})

_PUBLIC = LazyTable(
    "name",
    {
        "Backbone": "gstep.backbones.base:Backbone",
        "ModelSource": "gstep.checkpoints.source:ModelSource",
        "Preprocessor": "gstep.backbones.preprocess.base:Preprocessor",
        "Runtime": "gstep.backbones.runtime:Runtime",
        "SampledVideo": "gstep.backbones.base:SampledVideo",
        "StaticParts": "gstep.backbones.base:StaticParts",
        "TextTower": "gstep.backbones.siglip.text:TextTower",
        "TextTowerSource": "gstep.backbones.siglip.text:TextTowerSource",
        "choose_runtime": "gstep.backbones.runtime:choose_runtime",
        "read_tensors": "gstep.checkpoints.tensors:read_tensors",
    },
)

__all__ = [
    "BACKBONES",
    "Backbone",
    "ModelSource",
    "Preprocessor",
    "Runtime",
    "SampledVideo",
    "StaticParts",
    "TextTower",
    "TextTowerSource",
    "check_evidence",
    "choose_runtime",
    "limit_pixels",
    "load_backbone",
    "load_static",
    "preprocessor_for",
    "read_tensors",
    "text_tower",
    "token_bytes",
    "token_counts",
    "with_pooling_head",
]


def preprocessor_for(source: ModelSource) -> Preprocessor:
    """The picklable preprocessor of a model; reads no weights and imports no transformers.

    Raises ModelError where the checkpoint's preprocessor files ask for something not implemented.
    """
    preprocessor: Preprocessor = BACKBONES[source.model_type].preprocessor_for(source)
    return preprocessor


def limit_pixels(
    source: ModelSource, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None
) -> ModelSource:
    """The same model with other limits of its frames' size than its preprocessor files give; None keeps theirs.

    Args:
        min_pixels, max_pixels: of a frame on Qwen2.5-VL, of all sampled frames together on Qwen3-VL.
        max_video_tokens: turns on the stock processors' cap of long videos (cap_pixels_per_frame).

    Raises ModelError for a family whose frames have one size, and for limits that exclude each other.
    """
    limited: ModelSource = BACKBONES[source.model_type].limit_pixels(source, min_pixels, max_pixels, max_video_tokens)
    return limited


def with_pooling_head(source: ModelSource, siglip: str | Path) -> ModelSource:
    """The same model with the attention-pooling head of a SigLIP checkpoint, for evidence that is read from it.

    Args:
        siglip: a folder with safetensors or a Hugging Face id: the checkpoint that the model's vision tower was made
            of. "tiny" goes with the tiny LLaVA-OneVision. Only the head is read, here and where the model is loaded.

    Raises ModelError for a family without such a tower, and for a checkpoint without a head that fits.
    """
    with_head: ModelSource = BACKBONES[source.model_type].with_pooling_head(source, siglip)
    return with_head


def text_tower(source: ModelSource, siglip: str | Path) -> TextTowerSource:
    """The text tower of the SigLIP checkpoint that a model's vision tower was made of, and its pooling head beside it.

    Args:
        siglip: as for :func:`with_pooling_head`.

    Raises ModelError for a family without such a tower, and for a checkpoint without one that fits.
    """
    from gstep.backbones.siglip.text import TextTowerSource  # noqa: PLC0415 - imported when first used, as all here

    head = with_pooling_head(source, siglip).pooling_head
    assert head is not None
    return TextTowerSource.resolve(head)


def check_evidence(source: ModelSource, evidence: Mapping[str, str]) -> None:
    """Raises ModelError where the model's encoder cannot give all of the evidence, name -> source (gstep.evidence)."""
    BACKBONES[source.model_type].check_evidence(evidence, has_pooling_head=source.pooling_head is not None)


def load_static(source: ModelSource) -> StaticParts:
    """Hidden size, newline row and deepstack levels of a model, without building it; imports no transformers.

    Raises ModelError where the checkpoint lacks them.
    """
    static: StaticParts = BACKBONES[source.model_type].load_static(source)
    return static


def token_counts(source: ModelSource, n_frames: int, height: int, width: int) -> tuple[int, int]:
    """(T, N): frames (temporal patches on Qwen) and tokens of each, of frames of [height, width] pixels as the
    preprocessor resizes them. Known from the model's config alone, for planning."""
    counts: tuple[int, int] = BACKBONES[source.model_type].token_counts(source, n_frames, height, width)
    return counts


def token_bytes(source: ModelSource, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
    """Bytes of all visual tokens and of that evidence of them, bfloat16, of frames of [height, width] pixels as the
    preprocessor resizes them.

    Known from the model's config alone, for planning; a family's default stands in for what the config leaves out.
    """
    size: int = BACKBONES[source.model_type].token_bytes(source, n_frames, height, width, evidence)
    return size


def load_backbone(source: ModelSource, runtime: Runtime, *, frame_batch: int = 32) -> Backbone:
    """The vision part of a model, ready to encode; no weight of the language model is read.

    Raises ModelError where weights are missing or have another shape than the config says.
    """
    backbone: Backbone = BACKBONES[source.model_type].load(
        source,
        device=runtime.device,
        dtype=runtime.dtype,
        attn_implementation=runtime.attn_implementation,
        frame_batch=frame_batch,
    )
    return backbone


if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return _PUBLIC[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
