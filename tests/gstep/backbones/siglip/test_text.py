"""SigLIP's image-text space beside LLaVA-OneVision: patches through the head, questions through the text tower."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, SiglipModel

from gstep.backbones import ModelSource, TextTower, family_of
from gstep.errors import ModelError
from tests.builders.checkpoints import merge
from tests.gstep.reading import changed_json, changed_tensors, count_reading

TEXTS = ["What is ridden?", "WHO,  is: riding...", "A woman's red bike"]


def write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content))


@torch.no_grad()
def stock_features(folder, text):
    """[1,De] of the stock model and the stock call of its documentation."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer([text], padding="max_length", truncation=True, return_tensors="pt").input_ids
    return SiglipModel.from_pretrained(folder).eval().get_text_features(ids).pooler_output, ids


def test_a_text_is_what_the_stock_model_makes_of_it_and_one_without_a_word_is_refused(source, siglip):
    tower = TextTower.load(family_of(source).text_tower(siglip), "cpu")
    for text in TEXTS:
        expected, ids = stock_features(siglip, text)
        assert torch.equal(tower.segments(text), ids) and ids[0, -1] == tower.tokenizer.eos_token_id
        torch.testing.assert_close(tower.embedding(text), expected, rtol=1e-5, atol=1e-5)
    others = torch.cat([tower.embedding(other) for other in TEXTS])
    assert torch.cosine_similarity(others[:1], others[1:]).max() < 0.999
    for text in ("", "  ", "?!"):
        with pytest.raises(ValueError, match="no word that SigLIP's tokenizer knows"):
            tower.embedding(text)


def test_a_long_text_is_cut_into_segments_that_each_have_their_end(source, siglip):
    tower = TextTower.load(family_of(source).text_tower(siglip), "cpu")
    words = ["what", "is", "who", "a", "red", "bike", "ridden", "riding"] * 150
    text, end = " ".join(words), tower.tokenizer.eos_token_id
    embedded, segments = tower.embedding(text), tower.segments(text)
    assert embedded.shape == (len(segments), 64) and len(segments) > 64  # more than go through at once
    assert (segments[:, -1] == end).all()
    assert segments[segments != end].tolist() == tower.tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        expected = SiglipModel.from_pretrained(siglip).eval().get_text_features(segments).pooler_output
    torch.testing.assert_close(embedded, expected, rtol=1e-5, atol=1e-5)


def test_only_the_text_tower_is_read(source, siglip, monkeypatch):
    tower = family_of(source).text_tower(siglip)
    read = count_reading(monkeypatch)
    loaded = TextTower.load(tower, "cpu")
    assert set(read) == {name for name in load_file(siglip / "model.safetensors") if name.startswith("text_model.")}
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.float32}


def test_the_identity_covers_weights_config_and_tokenizer_and_another_node_must_have_it(source, siglip):
    def identity(place=siglip):
        return family_of(source).text_tower(place).identity

    resolved, usual = family_of(source).text_tower(siglip), identity("tiny")
    with changed_tensors(siglip) as tensors:
        tensors["vision_model.head.probe"] += 1
    assert identity() == resolved.identity == usual  # the head has an identity of its own
    with changed_tensors(siglip) as tensors:
        tensors["text_model.head.bias"] += 1e-3
    with pytest.raises(ModelError, match="another text tower on this node"):
        TextTower.load(resolved, "cpu")
    identities = {usual, identity()}
    with changed_json(siglip / "config.json") as config:
        config["text_config"]["layer_norm_eps"] = 1e-3
    identities.add(identity())
    text = (siglip / "tokenizer.json").read_text()
    (siglip / "tokenizer.json").write_text(text.replace('"Lowercase"', '"NFKC"'))
    assert len(identities | {identity()}) == 4
    with changed_tensors(siglip) as tensors:
        for name in [name for name in tensors if name.startswith("text_model.")]:
            del tensors[name]
    with pytest.raises(ModelError, match="no tensor of a text tower: name the whole SigLIP checkpoint"):
        family_of(source).text_tower(siglip)


@pytest.mark.parametrize(
    ("filename", "change", "words"),
    [
        ("config.json", {"text_config": {"intermediate_size": 100}}, r"config\.json does not fit the weights"),
        ("config.json", {"text_config": {"projection_size": 32}}, "text tower gives 32 values, its pooling head 64"),
        ("config.json", {"text_config": ...}, "vision half of a SigLIP checkpoint"),
        ("tokenizer_config.json", {"pad_token": None}, "names no eos_token or no pad_token"),
        ("tokenizer.json", {"model": None}, "no tokenizer that can be loaded"),
        ("tokenizer.json", None, r"has no file spiece\.model"),
    ],
)
def test_checkpoints_without_a_tower_that_fits_are_refused(source, siglip, filename, change, words):
    if change is None:
        (siglip / filename).unlink()
    else:
        write_json(siglip / filename, merge(json.loads((siglip / filename).read_text()), change))
    with pytest.raises(ModelError, match=words):
        TextTower.load(family_of(source).text_tower(siglip), "cpu")


def test_a_family_without_siglip_has_no_text_tower():
    with pytest.raises(ModelError, match="for LLaVA-OneVision"):
        family_of(ModelSource.resolve("tiny-qwen3-vl")).text_tower("tiny")
