"""jobs.testbed train: a training of a few steps, from nothing to a checkpoint that the product loads."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.language import load_language_model
from jobs.testbed.__main__ import main
from jobs.testbed.training.space import CELLS, TOKENS, WIDTH
from tests.jobs.jobs import run

pytestmark = pytest.mark.slow

STEPS = ("--vision", "2", "--reading", "3", "--videos", "2", "--sight", "2", "--held-out", "1", "--processes", "1")


def train(folder, *options):
    return main(["train", str(folder), *STEPS, *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "t"
    assert train(folder) == 0
    return folder


def test_the_product_loads_what_was_trained(trained):
    source = ModelSource.resolve(trained / "checkpoint")
    runtime = choose_runtime("cpu", "float32", "sdpa")
    assert source.model_type == "llava_onevision"
    backbone, model = family_of(source).load(runtime), load_language_model(source, runtime)
    assert backbone.hidden_size == WIDTH and 4e6 < model.n_bytes < 5e6
    tokenizer = AutoTokenizer.from_pretrained(trained / "checkpoint")
    assert len(tokenizer) == len(TOKENS) and tokenizer.eos_token == "<|im_end|>"


def test_weights_are_small_and_bfloat16(trained):
    path = trained / "checkpoint" / "model.safetensors"
    weights = load_file(path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16} and path.stat().st_size < 3_000_000
    (words,) = (tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
    assert words.shape == (len(TOKENS), WIDTH)
    names = {path.name for path in path.parent.iterdir()}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]


def test_the_card_names_recipe_hash_and_accuracy(trained):
    card = (trained / "checkpoint" / "README.md").read_text()
    assert "train DIR --seed 0 --vision 2 --reading 3 --videos 2 --sight 2 --held-out 1" in card
    for word in ("sha256", "| onset |", "| standing |", "Limits", "25 %"):
        assert word in card


def test_curves_are_drawn_of_all_stages(trained):
    with Image.open(trained / "curves.png") as picture:
        assert picture.width > 1000 and len(picture.convert("RGB").getcolors(1 << 20)) > 50
    for stage, steps in {"vision": 2, "reading": 3, "sight": 2}.items():
        assert json.loads((trained / f"{stage}.jsonl").read_text().splitlines()[-1])["step"] == steps


def test_tokens_of_the_corpus_are_as_a_cache_keeps_them(trained):
    tokens = load_file(trained / "tokens" / "16-00000.safetensors")["tokens"]
    assert tokens.dtype == torch.bfloat16 and tokens.shape == (2, 16, CELLS, WIDTH)


def test_another_process_makes_the_same_weights(trained, tmp_path):
    """Both halves at the same time, each in a process of its own."""
    done = run("jobs.testbed", "train", str(tmp_path / "t"), *STEPS[:-2], "--processes", "2")
    assert done.returncode == 0, done.stdout
    path = "checkpoint/model.safetensors"
    assert (tmp_path / "t" / path).read_bytes() == (trained / path).read_bytes()


def test_another_recipe_or_another_folder_is_refused(trained, tmp_path, capsys):
    assert train(trained, "--seed", "1") == 2
    assert "seed 0 instead of 1" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "notes.txt").write_text("mine")
    assert train(tmp_path) == 2
    assert "not empty and holds no training" in " ".join(capsys.readouterr().err.split())
