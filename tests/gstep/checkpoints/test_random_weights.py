"""Models with random weights: the same ones each time, finite in any precision, from a config and nothing else."""

import json

import pytest
import torch

from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.random_weights import draw_tensors, has_no_weights
from gstep.checkpoints.tensors import compute_tower_hash
from gstep.errors import ModelError
from gstep.language import BUILDERS, load_language_model, prompt_builder
from tests.gstep.reading import changed_json

NAMES = {config.config["model_type"]: name for name, config in tiny.TINY.items()}


@pytest.fixture(params=BUILDERS)
def bare(request, tmp_path):
    """A folder with a config.json alone."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.TINY[NAMES[request.param]].config))
    return folder


def random(model, tmp_path, name="made"):
    (tmp_path / name).mkdir()
    return ModelSource.random(model, tmp_path / name)


def test_both_halves_of_every_family_load_without_weights(bare, tmp_path):
    assert has_no_weights(str(bare))
    with pytest.raises(ModelError, match="no safetensors weights"):
        ModelSource.resolve(bare)
    source, runtime = random(bare, tmp_path), choose_runtime("cpu", "bfloat16")
    assert source.identity.startswith("random:") and not source.weight_files and compute_tower_hash(source) is None
    tower, llm = family_of(source).load(runtime), load_language_model(source, runtime)
    tensors = [*tower.model.parameters(), *llm.model.parameters()]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    again = load_language_model(random(bare, tmp_path, "again"), runtime)
    for one, other in zip(llm.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in bare.iterdir()] == ["config.json"]


def test_a_checkpoint_keeps_its_own_tokenizer_and_settings(tmp_path):
    ours, theirs = random("tiny-qwen2-5-vl", tmp_path), ModelSource.resolve("tiny-qwen2-5-vl")
    assert ours.preprocessor == theirs.preprocessor and ours.config == theirs.config
    text = "What happens?"
    assert prompt_builder(ours).tokenizer(text).input_ids == prompt_builder(theirs).tokenizer(text).input_ids


def test_a_tokenizer_is_made_around_the_ids_of_the_config_where_they_fit(bare, tmp_path):
    with changed_json(bare / "config.json") as config:
        config.get("text_config", config)["vocab_size"] = 5000
        config["video_token_index" if "video_token_index" in config else "video_token_id"] = 4321
    tokenizer = prompt_builder(random(bare, tmp_path)).tokenizer
    assert len(tokenizer) == 5000 and tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(4321)) == 4321
    spoken = "Grüße, ok?"
    ids = tokenizer(spoken).input_ids
    assert len(ids) == len(spoken.encode()) and tokenizer.decode(ids) == spoken
    with changed_json(bare / "config.json") as config:
        config.get("text_config", config)["vocab_size"] = 100
    with pytest.raises(ModelError, match=r"copy tokenizer\.json"):
        random(bare, tmp_path, "small")


def test_a_folder_with_any_weights_is_not_taken_for_one_without(tmp_path):
    assert not has_no_weights("tiny") and not has_no_weights(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors.index.json", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
        assert has_no_weights(str(tmp_path))
        (tmp_path / name).write_text("{}")
        assert not has_no_weights(str(tmp_path))
        (tmp_path / name).unlink()


def test_matrices_are_drawn_norms_are_one_and_biases_zero():
    shapes = {"a.weight": torch.empty(400, 300), "norm.weight": torch.empty(9), "a.bias": torch.empty(9)}
    made = draw_tensors(shapes, "cpu", torch.float16)
    assert 0.019 < float(made["a.weight"].float().std()) < 0.021
    assert bool((made["norm.weight"] == 1).all()) and not made["a.bias"].any()
    assert not torch.equal(made["a.weight"], draw_tensors(shapes, "cpu", torch.float16, seed=1)["a.weight"])
