"""Model families, a file each, which turn frames into visual tokens.

The order of use: :meth:`ModelSource.resolve` on the driver resolves a model argument, without any weights. Then
``family = family_of(source)``: ``family.preprocessor()`` is for decode processes, ``family.static()`` reads the few
weights of a cache header, and ``family.load(runtime)`` builds the vision part on a GPU. All names are imported on first
use, so that importing this package loads neither transformers nor safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gstep.families import FAMILIES
from gstep.lazy import LazyTable, make_getattr

if TYPE_CHECKING:
    from gstep.backbones.base import Backbone, ModelFamily, SampledVideo, StaticParts
    from gstep.backbones.preprocess import Preprocessor
    from gstep.backbones.runtime import Runtime, choose_runtime
    from gstep.backbones.siglip import TextTower, TextTowerSource
    from gstep.checkpoints.source import ModelSource
    from gstep.checkpoints.tensors import read_tensors

BACKBONES = LazyTable("model type", {name: family.backbone for name, family in FAMILIES.items()})

_PUBLIC = LazyTable(
    "name",
    {
        "Backbone": "gstep.backbones.base:Backbone",
        "ModelFamily": "gstep.backbones.base:ModelFamily",
        "ModelSource": "gstep.checkpoints.source:ModelSource",
        "Preprocessor": "gstep.backbones.preprocess:Preprocessor",
        "Runtime": "gstep.backbones.runtime:Runtime",
        "SampledVideo": "gstep.backbones.base:SampledVideo",
        "StaticParts": "gstep.backbones.base:StaticParts",
        "TextTower": "gstep.backbones.siglip:TextTower",
        "TextTowerSource": "gstep.backbones.siglip:TextTowerSource",
        "choose_runtime": "gstep.backbones.runtime:choose_runtime",
        "read_tensors": "gstep.checkpoints.tensors:read_tensors",
    },
)

__all__ = [
    "BACKBONES",
    "Backbone",
    "ModelFamily",
    "ModelSource",
    "Preprocessor",
    "Runtime",
    "SampledVideo",
    "StaticParts",
    "TextTower",
    "TextTowerSource",
    "choose_runtime",
    "family_of",
    "read_tensors",
]


def family_of(source: ModelSource) -> ModelFamily:
    """Return the family of a model, which describes it before any weight is loaded, and loads it."""
    family: ModelFamily = BACKBONES[source.model_type](source)
    return family


if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one
    __getattr__ = make_getattr(__name__, _PUBLIC)
