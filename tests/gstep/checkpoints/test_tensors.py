"""Single tensors of safetensors files, whole or in shards, and files that are refused."""

import json

import pytest
import torch

from gstep.backbones import ModelSource, family_of, read_tensors
from gstep.errors import ModelError
from tests.gstep.reading import INDEX, newline_of


def test_shards_give_the_same_tensors(folder, sharded):
    source = ModelSource.resolve(sharded)
    assert len(source.weight_files) == 2
    assert torch.equal(newline_of(sharded), newline_of("tiny"))


def test_shards_without_their_index_are_found_too(sharded):
    (sharded / INDEX).unlink()
    assert torch.equal(newline_of(sharded), newline_of("tiny"))


def test_only_shards_with_a_wanted_tensor_are_opened(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(newline_of(sharded), newline_of("tiny"))


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        newline_of(sharded)


def test_tensors_are_renamed_cast_and_independent_of_the_file(folder):
    source = ModelSource.resolve(folder)
    read = read_tensors(source, lambda key: "row" if key == "image_newline" else None, dtype=torch.bfloat16)
    assert list(read) == ["row"] and read["row"].dtype == torch.bfloat16
    stored = read_tensors(source, lambda key: key if key == "image_newline" else None)["image_newline"]
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(stored.bfloat16(), read["row"])


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_pickles_are_refused_and_never_opened(folder, pickled):
    (folder / "model.safetensors").rename(folder / pickled)
    with pytest.raises(ModelError, match=rf"{pickled}\) are refused.*save_pretrained"):
        ModelSource.resolve(folder)


def test_a_truncated_download_and_a_git_lfs_pointer(folder):
    weights = folder / "model.safetensors"
    source = ModelSource.resolve(folder)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="no complete safetensors"):
        family_of(source).static()
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        ModelSource.resolve(folder)


def test_an_index_that_points_outside(sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"image_newline": "../other.safetensors"}}))
    with pytest.raises(ModelError, match="outside"):
        ModelSource.resolve(sharded)
