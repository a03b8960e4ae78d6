"""The hash of a vision tower: the same however a checkpoint is cut, named or quantized around it, and no other's."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny
from gstep.checkpoints.tower import tower_hash
from gstep.errors import ModelError
from tests.gstep.llms import FAMILIES

TOWER = {"tiny": "vision_tower", "tiny-qwen2-5-vl": "visual", "tiny-qwen3-vl": "visual"}


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    """(its hash, a copy of its folder, the name that its tower's tensors hold)."""
    folder = Path(shutil.copytree(tiny.build(request.param), tmp_path / "copy"))
    return tower_hash(ModelSource.resolve(request.param)), folder, TOWER[request.param]


def changed(folder, change):
    """The hash of a folder's model after ``change`` of each (name, tensor)."""
    path = folder / "model.safetensors"
    save_file(dict(change(*item) for item in load_file(path).items()), path)
    return tower_hash(ModelSource.resolve(folder))


def test_the_hash_names_its_algorithm_and_does_not_depend_on_the_language_model(model):
    known, folder, tower = model
    assert known.startswith("blake2b-f16:") and len(known) == len("blake2b-f16:") + 32
    assert (
        changed(folder, lambda name, t: (name, t if tower in name or "proj" in name or "newline" in name else -t))
        == known
    )


def test_every_weight_of_the_tower_counts(model):
    known, folder, tower = model
    first = sorted(name for name in load_file(folder / "model.safetensors") if tower in name and t_is_used(name))[-1]
    assert changed(folder, lambda name, t: (name, t + 1 if name == first else t)) != known


def t_is_used(name):
    return not name.endswith("position_ids")


def test_names_of_other_library_versions_give_the_same_hash(model):
    known, folder, _ = model

    def renamed(name, tensor):
        plain = name.removeprefix("model.")
        return (plain if plain != name and "language_model" not in plain else name), tensor

    assert changed(folder, renamed) == known


def test_a_float16_copy_of_bfloat16_weights_has_the_same_hash(model):
    _, folder, _ = model
    coarse = changed(folder, lambda name, t: (name, t.to(torch.bfloat16)))
    assert changed(folder, lambda name, t: (name, t.to(torch.float16))) == coarse


def test_a_quantized_tower_is_refused(model):
    _, folder, tower = model
    with pytest.raises(ModelError, match="is stored as F8_E4M3"):
        changed(folder, lambda name, t: (name, t.to(torch.float8_e4m3fn) if tower in name and t.ndim == 2 else t))


def test_random_weights_have_none(tmp_path):
    assert tower_hash(ModelSource.random("tiny", tmp_path)) is None
