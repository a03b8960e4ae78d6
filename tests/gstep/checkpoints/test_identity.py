"""Which weights a folder holds, and the hash of its vision tower: the same however a checkpoint is cut or named."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource
from gstep.checkpoints.tensors import compute_tower_hash
from gstep.errors import ModelError
from tests.gstep.llms import FAMILIES
from tests.gstep.reading import changed_json, changed_tensors

TOWER = {name: "visual" if "qwen" in name else "vision_tower" for name in FAMILIES}


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
    with changed_tensors(folder) as tensors:  # a fine-tune of the same shapes
        tensors["multi_modal_projector.linear_2.weight"] *= 1.001
    assert ModelSource.resolve(folder).identity != identity


every_family = pytest.mark.parametrize(("name", "tower"), TOWER.items())


def changed(folder, change, **options):
    """The hash of a folder's model after ``change`` of each (name, tensor)."""
    path = folder / "model.safetensors"
    save_file(dict(change(*item) for item in load_file(path).items()), path)
    return compute_tower_hash(ModelSource.resolve(folder, **options))


@every_family
def test_a_hash_of_the_family_generic_is_that_of_all_but_the_language_model(folder, tower):
    options = {"family": "generic", "gate": False}
    known = changed(folder, lambda name, tensor: (name, tensor), **options)

    def retrained(name, tensor):
        return name, -tensor if "language_model" in name or "lm_head" in name else tensor

    assert changed(folder, retrained, **options) == known
    assert changed(folder, lambda name, tensor: (name, tensor + 1 if tower in name else tensor), **options) != known


@every_family
def test_the_towers_hash_is_that_of_its_weights_alone(source, folder, tower):
    known = compute_tower_hash(source)
    assert known.startswith("blake2b-f16:") and len(known) == len("blake2b-f16:") + 32

    def renamed(name, tensor):  # names of other library versions, and another language model
        plain = name.removeprefix("model.")
        used = tower in name or "proj" in name or "newline" in name
        return (plain if "language_model" not in plain else name), tensor if used else -tensor

    assert changed(folder, renamed) == known
    names = [name for name in load_file(folder / "model.safetensors") if tower in name]
    last = max(name for name in names if not name.endswith("position_ids"))
    assert changed(folder, lambda name, tensor: (name, tensor + 1 if name == last else tensor)) != known


@every_family
def test_a_float16_copy_of_bfloat16_weights_has_the_same_hash_and_a_quantized_tower_none(folder, tower):
    coarse = changed(folder, lambda name, t: (name, t.to(torch.bfloat16)))
    assert changed(folder, lambda name, t: (name, t.to(torch.float16))) == coarse
    with pytest.raises(ModelError, match="is stored as F8_E4M3"):
        changed(folder, lambda name, t: (name, t.to(torch.float8_e4m3fn) if tower in name and t.ndim == 2 else t))
