"""What the entry point ``lmms_eval.models`` names: how lmms-eval finds the model."""

from __future__ import annotations

from lmms_eval.models.registry_v2 import ModelManifest

MODEL = "gstep_cached"


def manifest() -> ModelManifest:
    """Return the manifest of a simple model: a chat model's messages make lmms-eval exit if a video file is gone."""
    return ModelManifest(model_id=MODEL, simple_class_path="pipeline.evaluate.lmms.plugin.GstepCached")
