"""What uses vLLM, in the environment that has it: .ci/vllm-environment makes one."""

import os

import pytest

from tests.environments import files_marked, passes_there

NAME = "GSTEP_VLLM_PYTHON"
python = os.environ.get(NAME)
FILES = files_marked("vllm")


@pytest.mark.slow
@pytest.mark.skipif(not python, reason=f"{NAME} names no interpreter that has vLLM")
@pytest.mark.parametrize("path", FILES)
def test_the_tests_that_need_vllm_pass_where_it_is(path):
    passes_there(str(python), path)


@pytest.mark.slow
@pytest.mark.skipif(not python, reason=f"{NAME} names no interpreter that has vLLM")
@pytest.mark.parametrize(
    "test",
    [
        "tests/pipeline/generate/engines/test_vllm.py::test_greedy_answers_are_the_same",
        "tests/pipeline/serve/test_live_engine.py::test_it_keeps_the_tokens_of_a_cache_and_gives_its_answers",
    ],
)
def test_the_engine_says_the_same_by_model_runner_v2(test):
    """It is vLLM's default on GPUs; here its kernels run in Triton's interpreter."""
    passes_there(str(python), test, VLLM_USE_V2_MODEL_RUNNER="1")


def test_there_are_such_tests():
    assert len(FILES) >= 4
