"""The entry point ``lmms_eval.models``, by which lmms-eval finds the model ``gstep_cached``."""

from __future__ import annotations

from lmms_eval.models.registry_v2 import ModelManifest

MODEL = "gstep_cached"


def manifest() -> ModelManifest:
    """Return the manifest of a simple model: for a chat model, lmms-eval exits if a video file is missing."""
    return ModelManifest(model_id=MODEL, simple_class_path="pipeline.evaluate.lmms.plugin.GstepCached")
