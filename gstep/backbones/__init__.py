"""Model families, which turn video frames into visual tokens.

:meth:`ModelSource.resolve` resolves a model argument on the driver, without reading weights. ``family_of(source)`` then
returns the model's family: ``family.preprocessor()`` is for decode processes, ``family.static()`` reads the few weights
that a cache's header holds, and ``family.load(runtime)`` builds the vision part on a device.

Importing this package loads neither transformers nor safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gstep.errors import ModelError
from gstep.families import FAMILIES, GENERIC, Family
from gstep.lazy import LazyTable, load_object, make_getattr

if TYPE_CHECKING:
    from gstep.backbones.base import Backbone, ModelFamily, SampledVideo, StaticParts
    from gstep.backbones.preprocess import Preprocessor
    from gstep.backbones.runtime import Runtime, choose_runtime
    from gstep.backbones.siglip import TextTower, TextTowerSource
    from gstep.checkpoints.source import ModelSource
    from gstep.checkpoints.tensors import read_tensors

#: Model type -> family class, for the families with code of their own; ``GENERIC`` is not included.
BACKBONES = LazyTable("model type", {name: family.backbone for name, family in FAMILIES.items() if name != GENERIC})

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
    "family_class",
    "family_of",
    "find_family",
    "read_tensors",
]


def family_of(source: ModelSource) -> ModelFamily:
    """Return the model family of ``source``; raise ModelError if a user family cannot be imported or is incomplete."""
    return family_class(source.family)(source)


def find_family(name: str) -> Family:
    """Return the table entry of the family ``name``, or build an entry for an import path ``module:Class``.

    The built entry has only ``backbone`` (the path) and ``prompts``, which is read from the imported class.

    Raises:
        ModelError: the class cannot be imported or is incomplete.
    """
    return FAMILIES[name] if name in FAMILIES else Family(name, family_class(name).prompts)


def family_class(name: str) -> type[ModelFamily]:
    """Import and return the class of a model family.

    Args:
        name: a key of ``gstep.families.FAMILIES``, or the import path ``module:Class`` of a user family.

    Raises:
        ModelError: a user family cannot be imported (for any reason), or is not a subclass of ModelFamily that defines
            all abstract methods, ``model_type`` and ``variant``.
    """
    if name in FAMILIES:
        kind: type[ModelFamily] = load_object(FAMILIES[name].backbone)
        return kind
    from gstep.backbones.base import ModelFamily  # noqa: PLC0415 - torch takes a second

    try:
        kind = load_object(name)
    except Exception as error:  # importing runs code of the family's author
        raise ModelError(
            f"the family {name!r} cannot be imported: {type(error).__name__}: {error}; its module must be importable "
            "on every machine that encodes: in a package that is installed there, or in a folder on PYTHONPATH"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, ModelFamily)):
        raise ModelError(f"the family {name!r} is not a subclass of gstep.backbones.ModelFamily")
    missing = [*sorted(kind.__abstractmethods__), *(n for n in ("model_type", "variant") if not hasattr(kind, n))]
    if missing:
        raise ModelError(f"the family {name!r} does not define {', '.join(missing)} (see gstep.backbones.ModelFamily)")
    return kind


if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one
    __getattr__ = make_getattr(__name__, _PUBLIC)
