"""The tiny models: the same bytes everywhere, loud tokens on real frames, and a whole LLM for transformers."""

import resource
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from gstep.checkpoints import tiny
from gstep.errors import ModelError

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
    if name != "tiny":
        own = [{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "A."}]
        assert tokenizer.apply_chat_template(own, tokenize=False) == (
            f"<|im_start|>system\nBe brief.<|im_end|>\n{QWEN_TURN}<|im_start|>assistant\nA.<|im_end|>\n"
        )
        text = config.text_config
        head_dim = text.hidden_size // text.num_attention_heads
        assert head_dim >= 32 and sum(text.rope_parameters["mrope_section"]) == head_dim // 2
