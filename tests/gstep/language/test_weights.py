"""The language part of a checkpoint, in every layout, and never the vision part."""

import re

import pytest
import torch
from safetensors.torch import save_file

from gstep.backbones import ModelSource, choose_runtime
from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError
from gstep.language import load_language_model, prompt_builder
from gstep.language.weights import InputEmbeddings, build_without_vision
from tests.gstep.llms import FLOAT32, QUESTION, llm, stock
from tests.gstep.qwen_configs import SIZES
from tests.gstep.reading import changed_json, changed_tensors, count_reading


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


def test_what_save_pretrained_writes_and_keys_as_they_are_in_memory_load(name, folder, video, source):
    expected = prompt_logits(source, name, video)
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


def test_a_library_that_would_ignore_cached_tokens_is_refused(name, source, monkeypatch):
    def older(self, input_ids=None, **keywords):
        pass

    monkeypatch.setattr(type(llm(name).model), "forward", older)
    with pytest.raises(ModelError, match=r"takes no cached tokens: pip install 'transformers>=5\.18"):
        load_language_model(source, FLOAT32)


def llava_config(hidden, layers, heads, kv, inner, tied):
    """What decides the language model in the config.json of LLaVA-OneVision on the hub."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": 152000 if tied else 152128}
    rope = {"max_position_embeddings": 32768, "rope_theta": 1000000.0}
    text = {"model_type": "qwen2", **sizes, **rope, "tie_word_embeddings": tied}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 26, "image_size": 384}
    return {"model_type": "llava_onevision", "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


LLMS = {
    "LLaVA-OneVision-0.5B": llava_config(896, 24, 14, 2, 4864, tied=True),
    "LLaVA-OneVision-7B": llava_config(3584, 28, 28, 4, 18944, tied=False),
    **{size: config for size, (config, _, _) in SIZES.items()},
}
MILLIONS = [494, 7616, 3086, 7615, 32763, 72704, 1721, 4022, 8191, 32762]  # of parameters without the vision part
TIED = ("LLaVA-OneVision-0.5B", "Qwen2.5-VL-3B", "Qwen3-VL-2B", "Qwen3-VL-4B")  # heads to the embeddings


@pytest.mark.parametrize(("size", "expected"), [*zip(LLMS, MILLIONS, strict=True)])
def test_every_dense_size_on_the_hub_is_known_by_its_config(size, expected):
    config = LLMS[size]
    source = ModelSource(size, "none", CheckpointFiles("folder", "/none"), (), config["model_type"], config, {})
    model = build_without_vision(source.parse_stock_config(), choose_runtime("cpu", "bfloat16", "sdpa"))
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    millions = round(sum(p.numel() for p in model.parameters()) / 1e6)
    assert (millions, model.lm_head is None) == (expected, size in TIED)
