"""What the doctor says of vLLM where it is; tests/test_vllm.py runs this there."""

import pytest

from pipeline.doctor.vllm import check_vllm
from tests import vllm_here

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_runner_that_works_here_answers_and_the_other_one_is_unknown_without_a_gpu():
    assert vllm_here.PARAMS
    first, second = check_vllm()
    assert first.state == "ok" and "4 answers as of transformers" in first.says, first
    assert first.name.startswith("vllm V1 (vllm") and second.state == "unknown"


def test_an_engine_that_does_not_start_is_wrong_with_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, _ = check_vllm()
    assert first.state == "wrong" and "libcudart.so: cannot open" in first.says and first.remedy
