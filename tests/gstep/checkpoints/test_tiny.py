"""The tiny models: the same bytes everywhere; and models with random weights from a config and nothing else."""

import json
import resource
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.random_weights import draw_tensors, has_no_weights
from gstep.checkpoints.tensors import compute_tower_hash
from gstep.errors import ModelError
from gstep.language import BUILDERS, load_language_model, prompt_builder
from tests.gstep.reading import changed_json

# Pinned: a machine or a numpy that makes other bytes must fail here, and a change must come with a new VERSION.
IDENTITIES = {
    "tiny": "tiny:2-db6a753de601",
    "tiny-qwen2-5-vl": "tiny-qwen2-5-vl:2-1640e1090ec9",
    "tiny-qwen3-vl": "tiny-qwen3-vl:2-266202127321",
    "tiny-qwen3-vl-moe": "tiny-qwen3-vl-moe:2-fae527139da9",
    "tiny-internvl": "tiny-internvl:2-dc320f8d7f37",
    "tiny-qwen3-5": "tiny-qwen3-5:2-38cbe70a1971",
    "tiny-qwen3-5-moe": "tiny-qwen3-5-moe:2-3ea1c4d1ccf1",
}
MESSAGES = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Qu'est-ce qui se passe? 什么"}]}]


def test_identity_is_the_same_on_every_machine():
    assert {name: tiny.compute_tiny_identity(name) for name in tiny.TINY} == IDENTITIES


@pytest.mark.parametrize("name", tiny.TINY)
def test_two_builds_have_the_same_bytes(tmp_path, name):
    tiny.write_tiny_model(name, tmp_path)
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (tmp_path, tiny.build(name)))
    assert first == second
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= set(first)
    assert ("video_preprocessor_config.json" in first) == (name != "tiny-qwen2-5-vl")  # as on the hub


def test_a_process_that_comes_second_takes_what_the_first_built(tmp_path, monkeypatch):
    whole = {path.name for path in tiny.build("tiny").iterdir()}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun, write = [], tiny.write_tiny_model

    def write_while_another_finishes(name: str, folder: Path) -> None:
        if not begun:
            begun.append(folder)
            tiny.build(name)
        write(name, folder)

    monkeypatch.setattr(tiny, "write_tiny_model", write_while_another_finishes)
    folder = tiny.build("tiny")
    assert [path.name for path in (tmp_path / "gstep").iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} == whole


def test_nothing_is_written_to_the_home_folder_and_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tiny.build("tiny")
    assert folder.parent.parent == tmp_path and folder.parent.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "home").exists()
    (tmp_path / "gstep-12345").mkdir()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ModelError, match="gstep-12345 belongs to another user: set XDG_CACHE_HOME"):
        tiny.build("tiny")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        tiny.build("tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # the disk fills up while the weights are written
    try:
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            tiny.build("tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "full/gstep").iterdir())


QUESTION = "Qu'est-ce qui se passe? 什么<|im_end|>"
QWEN_TURN = f"<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>{QUESTION}\n"
QWEN_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("tiny", f"<|im_start|>user <video>\n{QUESTION}"),
        ("tiny-qwen2-5-vl", QWEN_SYSTEM + QWEN_TURN),
        ("tiny-qwen3-vl", QWEN_TURN),
    ],
)
def test_the_tokenizer_of_a_tiny_llm_talks_in_the_form_of_its_family(source, name, turn):
    tokenizer = AutoTokenizer.from_pretrained(source.pretrained()[0])
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert prompt == f"{turn}<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    config = AutoConfig.from_pretrained(source.pretrained()[0])
    for kind in ("image", "video"):
        token = f"<{kind}>" if name == "tiny" else f"<|{kind}_pad|>"
        assert tokenizer.convert_tokens_to_ids(token) == getattr(config, f"{kind}_token_id")


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


def test_a_config_that_its_reader_changes_is_parsed_anew_for_the_next():
    source = ModelSource.resolve("tiny")
    first = source.parse_stock_config()
    first.vision_config.hidden_size, first.text_config.num_hidden_layers = 1, 1
    again = source.parse_stock_config()
    assert again.vision_config.hidden_size > 1 and again.text_config.num_hidden_layers > 1
