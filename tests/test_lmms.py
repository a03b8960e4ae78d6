"""What uses lmms-eval, in the environment that has it: .ci/lmms-environment makes one."""

import os

import pytest

from tests.environments import files_marked, passes_there

NAME = "GSTEP_LMMS_PYTHON"
python = os.environ.get(NAME)
FILES = files_marked("lmms")


@pytest.mark.slow
@pytest.mark.skipif(not python, reason=f"{NAME} names no interpreter that has lmms-eval: .ci/lmms-environment DIR")
@pytest.mark.parametrize("path", FILES)
def test_the_tests_that_need_lmms_eval_pass_where_it_is(path):
    passes_there(str(python), path)


def test_there_are_such_tests():
    assert FILES
