"""--model_args as lmms-eval hands them over: converted, quoted, mistyped. lmms-eval is not needed."""

import pytest

from pipeline.cache.header import compute_fingerprint
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.evaluate.lmms.arguments import ModelArguments, explain_flags
from tests.builders.caches import make_identity

PLACES = {"cache": "c", "answers": "a"}
HELD = make_identity(1.0, "none")


def test_values_get_their_types_back():
    given = {"batch_size": "4", "retention_ratio": 1, "seed": 3.0, "system": "'Yes, or no.'"}
    read = ModelArguments.read({**PLACES, **given})
    assert (read.batch_size, read.retention_ratio, read.seed, read.system) == (4, 1.0, 3, "Yes, or no.")
    assert ModelArguments.read({**PLACES, "batch_size": "auto", "device": None}).batch_size is None
    assert ModelArguments.read({**PLACES, "batch_size": 1}).batch_size == 1


def test_options_are_those_of_jobs_generate():
    given = {"pretrained": "tiny", "method": "gstep", "alpha": 0.5, "smoothing": "box", "retention_ratio": 0.1}
    config = ModelArguments.read({**PLACES, **given}).config(HELD)
    assert (config.cache, config.out, config.model, config.pruner) == ("c", "a", "tiny", "gstep")
    assert config.pruner_params() == {"alpha": "0.5", "smoothing": "box"} and config.retention_ratio == 0.1
    assert config.choices == "generate" and config.retry_failed


@pytest.mark.parametrize(
    ("more", "model", "system", "times"),
    [
        ({}, HELD["model"], "You are a helpful assistant.", "true"),
        ({}, {"type": "qwen3_vl"}, "You are a helpful assistant.", "stock"),
        ({"system": "", "frame_times": "true"}, {"type": "qwen3_vl"}, None, "true"),
        ({}, {"type": "qwen3_vl", "family": "generic"}, "You are a helpful assistant.", "true"),
        ({"system": "Be brief."}, HELD["model"], "Be brief.", "true"),
        ({}, {"type": "qwen2_5_vl"}, None, "true"),
    ],
)
def test_system_text_and_times_are_those_of_lmms_evals_own_classes_unless_said(more, model, system, times):
    config = ModelArguments.read({**PLACES, **more}).config({**HELD, "model": {"weights": "w", **model}})
    assert (config.system, config.frame_times) == (system, times)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cache": "c"}, "answers=PATH is missing"),
        ({**PLACES, "retention_ration": 0.1}, "there is no retention_ration; did you mean retention_ratio?"),
        ({**PLACES, "alpha": 0.5}, "there is no alpha; "),
        ({**PLACES, "method": "gstep", "alfa": 0.5}, "there is no alfa; did you mean alpha?"),
        ({**PLACES, "method": "magic"}, "unknown method 'magic'"),
        ({"cache": 7, "answers": "a"}, "cache must be text, and lmms-eval made 7 of it: write a path as ./7"),
        ({**PLACES, "batch_size": "many"}, "batch_size must be a whole number, got 'many'"),
        ({**PLACES, "missing": "skip"}, "missing must be error or empty, got 'skip'"),
        ({**PLACES, "method": "gstep"}, "--pruner gstep needs --retention-ratio.*--pruner is method="),
        ({**PLACES, "positions": "odd"}, "--positions must be one of"),
    ],
)
def test_what_cannot_be_is_refused_and_errors_of_jobs_generate_say_what_its_flags_are_here(given, why):
    with pytest.raises(UsageError, match=why), explain_flags():
        ModelArguments.read(given).config(HELD)


def test_another_cache_is_told_by_its_fingerprint():
    known = compute_fingerprint(HELD)
    for said in {}, {"fingerprint": known}:
        assert ModelArguments.read({**PLACES, **said}).check_fingerprint(HELD) == known
    with pytest.raises(IdentityMismatch, match=f"{known}"):
        ModelArguments.read({**PLACES, "fingerprint": "blake2b:0"}).check_fingerprint(HELD)
