"""Which weights a folder holds, by its content."""

import shutil
from pathlib import Path

from gstep.backbones import ModelSource
from tests.gstep.reading import changed_json, changed_tensors


def test_a_folders_identity_is_its_content(folder, tmp_path):
    identity = ModelSource.resolve(folder).identity
    assert identity.startswith("folder:")
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    with changed_json(copy / "config.json") as config:
        config["transformers_version"] = "9"
    assert ModelSource.resolve(copy).identity == identity
    with changed_json(copy / "config.json") as config:
        config["vision_feature_layer"] = -2
    assert ModelSource.resolve(copy).identity != identity


def test_a_fine_tune_of_the_same_shapes_has_another_identity(folder):
    identity = ModelSource.resolve(folder).identity
    with changed_tensors(folder) as tensors:
        tensors["multi_modal_projector.linear_2.weight"] *= 1.001
    assert ModelSource.resolve(folder).identity != identity
