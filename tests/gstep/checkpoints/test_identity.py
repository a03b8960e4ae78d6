"""Which weights a folder holds, by its content."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource


def test_a_folders_identity_is_its_content(folder, tmp_path):
    identity = ModelSource.resolve(folder).identity
    assert identity.startswith("folder:")
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    assert ModelSource.resolve(copy).identity == identity
    (copy / "config.json").write_text(json.dumps({**config, "vision_feature_layer": -2}))
    assert ModelSource.resolve(copy).identity != identity


def test_a_fine_tune_of_the_same_shapes_has_another_identity(folder):
    identity = ModelSource.resolve(folder).identity
    tensors = load_file(folder / "model.safetensors")
    tensors["multi_modal_projector.linear_2.weight"] *= 1.001
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert ModelSource.resolve(folder).identity != identity
