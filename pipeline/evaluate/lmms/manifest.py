"""What the entry point ``lmms_eval.models`` names: how lmms-eval finds the model."""

from __future__ import annotations

from lmms_eval.models.registry_v2 import ModelManifest

MODEL = "gstep_cached"


def manifest() -> ModelManifest:
    """A simple model alone: the messages of a chat model make lmms-eval end the process where a video file is gone."""
    return ModelManifest(model_id=MODEL, simple_class_path="pipeline.evaluate.lmms.plugin.GstepCached")
