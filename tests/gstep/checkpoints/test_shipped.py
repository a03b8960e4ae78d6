"""The trained model that comes with the package."""

import dataclasses
import hashlib
import re

import pytest

from gstep.backbones import ModelSource
from gstep.checkpoints import shipped
from gstep.errors import ModelError


def test_it_is_found_by_its_name_alone():
    source = ModelSource.resolve("shapes")
    assert source.model_type == "llava_onevision" and re.fullmatch(r"shapes:[0-9a-f]{32}", source.identity)
    assert source.weight_files == ("model.safetensors",)
    assert source.pretrained() == (str(shipped.SHIPPED["shapes"]), None)


def test_a_copy_elsewhere_is_a_folder_with_the_same_hash(tmp_path):
    for path in shipped.SHIPPED["shapes"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    copied, own = ModelSource.resolve(tmp_path), ModelSource.resolve("shapes")
    assert copied.identity == own.identity.replace("shapes:", "folder:")


def test_a_node_with_another_one_is_refused():
    source = dataclasses.replace(ModelSource.resolve("shapes"), identity="shapes:" + "0" * 32)
    with pytest.raises(ModelError, match=r"this node has shapes:.*the same version of this package"):
        source.file("config.json")


def test_a_revision_is_refused():
    with pytest.raises(ModelError, match="belongs to a Hugging Face id; 'shapes' is a shipped model"):
        ModelSource.resolve("shapes", "main")


@pytest.mark.parametrize("name", shipped.SHIPPED)
def test_the_card_is_of_these_weights(name):
    folder = shipped.SHIPPED[name]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    assert not [path for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pkl", ".py"}]
