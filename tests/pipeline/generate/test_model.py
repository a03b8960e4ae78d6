"""Other weights may answer from a cache where they come with its vision encoder, quantized ones by vLLM alone."""

import shutil
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny
from gstep.checkpoints.tensors import compute_tower_hash
from gstep.errors import ModelError
from pipeline import TokenCache
from pipeline.errors import IdentityMismatch
from pipeline.generate.model import check_model, read_tower_hash
from pipeline.serve.prompts import CachedPrompts, ServedCache
from tests.builders.answers import tiny_cache
from tests.gstep.quantized import CONFIGS, quantize


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c")
    return TokenCache(tmp_path / "c")


def check(cache, source):
    check_model(cache.store, cache.identity["model"], source, partial(read_tower_hash, cache.store, cache.header))


@pytest.mark.parametrize("method", CONFIGS)
def test_a_quantized_language_model_is_taken_with_the_encoder_of_the_cache(cache, tmp_path, method):
    folder = quantize("tiny", method, tmp_path / "q")
    with pytest.raises(ModelError, match=f"{method}.*--engine vllm"):
        ModelSource.resolve(folder)
    source = ModelSource.resolve(folder, quantized=True)
    assert source.identity != cache.identity["model"]["weights"]
    check(cache, source)
    CachedPrompts(ServedCache(str(cache.store), str(folder))).close()


def test_another_encoder_is_refused_with_both_hashes(cache, tmp_path):
    folder = shutil.copytree(tiny.build("tiny"), tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t + 1 if "projector" in name else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    source, stored = ModelSource.resolve(folder), read_tower_hash(cache.store, cache.header)
    with pytest.raises(
        IdentityMismatch, match=f"{stored}.*{compute_tower_hash(source)}: use a checkpoint made from the cache"
    ):
        check(cache, source)


def test_a_cache_that_does_not_say_its_encoder_takes_no_other_weights(cache, tmp_path):
    source = ModelSource.resolve(quantize("tiny", "fp8", tmp_path / "q"), quantized=True)
    with pytest.raises(IdentityMismatch, match="not known: it was made before they were"):
        check_model(cache.store, cache.identity["model"], source, lambda: None)


def test_a_method_that_vllm_is_not_asked_for_is_refused(tmp_path):
    folder = quantize("tiny", "fp8", tmp_path / "q")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"quant_method": "fp8"', '"quant_method": "bitsandbytes"'))
    with pytest.raises(ModelError, match="bitsandbytes"):
        ModelSource.resolve(folder, quantized=True)
