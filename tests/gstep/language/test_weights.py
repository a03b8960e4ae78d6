"""The language part of a checkpoint, in every layout, and never the vision part."""

import re

import pytest
import torch
from safetensors.torch import save_file

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.language import load_language_model, prompt_builder
from gstep.language.weights import InputEmbeddings
from tests.gstep.llms import FAMILIES, FLOAT32, QUESTION, llm, stock
from tests.gstep.reading import changed_json, changed_tensors, count_reading


@pytest.mark.parametrize("name", FAMILIES, scope="module")
def test_nothing_of_the_vision_part_is_read_or_held(name, source, monkeypatch):
    read = count_reading(monkeypatch)
    loaded = load_language_model(source, FLOAT32)
    vision = ("vision_tower", "multi_modal_projector", "image_newline", "visual")
    assert not [key for key in read if any(part in key for part in vision)]
    text = sum(p.nbytes for key, p in stock(name).named_parameters() if not any(part in key for part in vision))
    buffers = sum(b.nbytes for b in loaded.model.buffers())
    assert sum(read.values()) == text == loaded.n_bytes - buffers
    assert not any(t.is_meta or t.requires_grad for t in (*loaded.model.parameters(), *loaded.model.buffers()))
    assert not loaded.model.training


def prompt_logits(source, name, video):
    loaded = load_language_model(source, FLOAT32)
    return loaded.logits([prompt_builder(source).build(QUESTION, [video.visual])])[0]


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2-5-vl", "tiny-qwen3-vl-moe", "tiny-qwen3-5-moe"], scope="module")
def test_what_save_pretrained_writes_and_keys_as_they_are_in_memory_load(name, folder, video, source):
    expected = llm(name).logits([prompt_builder(source).build(QUESTION, [video.visual])])[0]
    state = {key: value.contiguous() for key, value in stock(name).state_dict().items()}
    save_file(state, folder / "model.safetensors")
    assert torch.equal(prompt_logits(ModelSource.resolve(folder), name, video), expected)
    (folder / "model.safetensors").unlink()
    stock(name).save_pretrained(folder, max_shard_size="300KB")
    saved = ModelSource.resolve(folder)
    assert len(saved.weight_files) > 1
    assert torch.equal(prompt_logits(saved, name, video), expected)


def test_a_tied_head_is_the_embedding(name, folder, video):
    with changed_tensors(folder) as tensors:
        head = next(key for key in tensors if key.endswith("lm_head.weight"))
        embedding = next(key for key in tensors if key.endswith("embed_tokens.weight"))
        tensors[head] = tensors[embedding].clone()
    expected = prompt_logits(ModelSource.resolve(folder), name, video)
    with changed_tensors(folder) as tensors:
        del tensors[head]
    with pytest.raises(ModelError, match=r"has no lm_head\.weight"):
        load_language_model(ModelSource.resolve(folder), FLOAT32)
    with changed_json(folder / "config.json") as config:
        config["tie_word_embeddings"] = True
    tied = ModelSource.resolve(folder)
    loaded = load_language_model(tied, FLOAT32)
    assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight
    assert torch.equal(prompt_logits(tied, name, video), expected)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-vl-moe"], scope="module")
def test_missing_weights_are_named(name, folder):
    with changed_tensors(folder) as tensors:
        # Of one expert where it can.
        parts = re.compile(r"layers\.1\.mlp\.(experts\.(1\.)?)?(gate_)?up_proj(\.weight)?$")
        for key in [key for key in tensors if parts.search(key)]:
            del tensors[key]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.(experts\.gate_up_proj|up_proj\.weight)"):
        load_language_model(ModelSource.resolve(folder), FLOAT32)


def test_a_text_has_the_embedding_that_the_model_gives_it(name, source):
    table = InputEmbeddings(source, llm(name).tokenizer, torch.float32)
    for text in ("What?", "Qu'est-ce qui se passe? 什么"):
        assert torch.equal(table.mean(text), llm(name).embedding(text))
    with pytest.raises(ValueError, match="one character"):
        table.mean("")


@pytest.mark.parametrize("name", ["tiny"], scope="module")
def test_a_library_that_would_ignore_cached_tokens_is_refused(name, source, monkeypatch):
    def older(self, input_ids=None, **keywords):
        pass

    monkeypatch.setattr(type(llm(name).model), "forward", older)
    with pytest.raises(ModelError, match=r"takes no cached tokens: pip install 'transformers>=5\.18"):
        load_language_model(source, FLOAT32)
