"""The benchmark of many requests at once, beside a client whose texts are too large."""

import json

import pytest

from jobs.benchmark.__main__ import main
from jobs.benchmark.serving.crowd import measure_crowd
from pipeline.errors import RunFailed
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.pipeline.asking import tiny_cache

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_both_crowds_are_answered_and_large_texts_are_refused(tmp_path):
    tiny_cache(tmp_path / "c", ("a", "b"))
    argv = ["serving", "--crowd", "100", "--repeats", "1", "--cache", str(tmp_path / "c")]
    assert main([*argv, "--json", str(tmp_path / "j")]) == 0
    record = json.loads((tmp_path / "j").read_text())
    alone, beside = record["crowd"]
    assert (alone["large"], beside["large"], alone["n_large"]) == (False, True, 0) and beside["n_large"] > 0
    assert all(0 < waited["p50_s"] <= waited["p99_s"] for waited in (alone, beside))
    assert record["p99_ratio"] == beside["p99_s"] / alone["p99_s"]


def test_a_server_that_does_not_start_is_said(tmp_path):
    with pytest.raises(RunFailed, match=r"did not become ready.*not a pruned-token cache"):
        measure_crowd(str(tmp_path), requests=1, rounds=1)
