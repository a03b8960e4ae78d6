"""The hash of a user's own code: what it depends on, what changes nothing, and where there is no source."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gstep import make_pruner
from pipeline.own_code import hash_code, is_own, locate_own_error

HELPERS = """
def rank(x):
    return x

def unused():
    return 3
"""
MINE = '''
import math
from functools import partial
import own_helpers
from gstep.pruners.base import Pruner

FACTOR = 3
OTHER = 4


def scaled(x):
    return own_helpers.rank(x) * FACTOR


class Mine:
    """A class."""

    def select(self, visual):
        # largest first
        return scaled(visual)
'''
FROM = MINE.replace("import own_helpers", "from own_helpers import rank, unused").replace("own_helpers.rank", "rank")
STAR = MINE.replace("import own_helpers", "from own_helpers import *").replace("own_helpers.rank", "rank")
TRIED = MINE.replace("import own_helpers", "try:\n    import own_helpers\nexcept ImportError:\n    own_helpers = None")
INSIDE = MINE.replace("import own_helpers\n", "").replace(
    "    return own_helpers", "    import own_helpers\n    return own_helpers"
)
BASE = MINE.replace("class Mine:", "class Mine(own_helpers.Base):")
WITH_BASE = f"{HELPERS}\nclass Base:\n    step = 1\n"


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The hash of the class Mine of a module, beside a module of helpers."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(mine: str, helpers: str = HELPERS) -> str:
        (tmp_path / "own_mine.py").write_text(mine)
        (tmp_path / "own_helpers.py").write_text(helpers)
        for name in ("own_mine", "own_helpers"):
            (tmp_path / "__pycache__" / f"{name}.cpython-{sys.version_info[0]}{sys.version_info[1]}.pyc").unlink(True)
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return hash_code(importlib.import_module("own_mine").Mine)

    return write


def test_comments_docstrings_layout_and_what_it_does_not_name_change_nothing(hashed: Callable[..., str]) -> None:
    first = hashed(MINE)
    for other in (
        MINE.replace("# largest first", "#"),
        MINE.replace('"""A class."""', '"""Another\n\n    text."""'),
        MINE.replace("return scaled(visual)", "return scaled(\n            visual,\n        )"),
        MINE.replace("OTHER = 4", "OTHER = 5"),
        MINE.replace("import math\n", "import math, os\n"),
        f'{MINE}\nif __name__ == "__main__":\n    FACTOR = 9\n',
    ):
        assert hashed(other) == first, other
    assert hashed(MINE, HELPERS.replace("return 3", "return 5")) == first


@pytest.mark.parametrize("mine", [MINE, FROM, STAR, TRIED, INSIDE], ids=["import", "from", "star", "try", "inside"])
def test_what_it_names_in_any_module_of_the_users_counts(hashed: Callable[..., str], mine: str) -> None:
    assert hashed(mine) != hashed(mine, HELPERS.replace("return x", "return -x"))
    assert hashed(mine) != hashed(mine.replace("FACTOR = 3", "FACTOR = 2"))
    assert hashed(mine) != hashed(f"{mine}\nMine.step = 3\n")
    assert hashed(mine) != hashed(mine.replace("largest first\n", "\n        visual = -visual\n"))


def test_a_base_class_of_the_users_counts(hashed: Callable[..., str]) -> None:
    assert hashed(BASE, WITH_BASE) != hashed(BASE, WITH_BASE.replace("step = 1", "step = 2"))


def test_without_source_it_is_of_the_bytecode() -> None:
    def made(code: str) -> str:
        module = types.ModuleType("own_notebook")
        sys.modules["own_notebook"] = module
        exec(code.replace("import own_helpers\n", "").replace("own_helpers.rank", "abs"), vars(module))  # noqa: S102
        return hash_code(module.Mine)

    try:
        first = made(MINE)
        assert made(MINE.replace("A class.", "B")) == made(MINE.replace("OTHER = 4", "OTHER = 5")) == first
        assert made(f"\n\n{MINE}") == first
        for changed in ("FACTOR = 2", "FACTOR = -3"):
            assert made(MINE.replace("FACTOR = 3", changed)) != first
        assert made(MINE.replace("* FACTOR", "+ FACTOR")) != first
    finally:
        del sys.modules["own_notebook"]


class Failing:
    """A class of a user, which this test is."""

    def select(self) -> int:
        return int("x")


def test_the_innermost_line_of_the_users_is_to_blame_and_no_line_of_the_package() -> None:
    line, gstep = Failing.select.__code__.co_firstlineno + 1, type(make_pruner("gstep"))
    with pytest.raises(ValueError, match="invalid literal") as raised:
        Failing().select()
    assert locate_own_error(raised.value, Failing) == f"{__file__}:{line}"
    assert locate_own_error(raised.value, gstep) is None and is_own(Failing) and not is_own(gstep)
