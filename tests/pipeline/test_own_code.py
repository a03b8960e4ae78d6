"""The hash of a user's own code: what it covers, what does not change it, and a class without a file."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gstep import make_pruner
from pipeline.errors import UsageError
from pipeline.own_code import hash_code, is_comparable, is_user_class, locate_user_error

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
INSIDE = MINE.replace("import own_helpers\n", "").replace(
    "    return own_helpers", "    import own_helpers\n    return own_helpers"
)


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


def test_comments_docstrings_layout_and_the_script_change_nothing(hashed: Callable[..., str]) -> None:
    first = hashed(MINE)
    assert hashed(MINE.replace("# largest first", "#")) == first
    assert hashed(MINE.replace('"""A class."""', '"""Another\n\n    text."""')) == first
    assert hashed(MINE.replace("return scaled(visual)", "return scaled(\n            visual,\n        )")) == first
    assert hashed(f'{MINE}\nif __name__ == "__main__":\n    FACTOR = 9\n') == first


@pytest.mark.parametrize("mine", [MINE, FROM, INSIDE], ids=["import", "from", "inside"])
def test_every_statement_of_its_module_and_of_the_users_modules_that_it_imports_counts(
    hashed: Callable[..., str], mine: str
) -> None:
    others = [(mine, HELPERS.replace(*change)) for change in (("return x", "return -x"), ("return 3", "return 5"))]
    others += [(mine.replace("FACTOR = 3", "FACTOR = 2"),), (f"{mine}\nMine.step = 3\n",)]
    others += [(mine.replace("largest first\n", "\n        visual = -visual\n"),)]
    assert hashed(mine) not in [hashed(*other) for other in others]


def test_modules_count_that_an_imported_package_imports_by_relative_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "own_package"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__.py": "from . import inner\n",
        "inner/__init__.py": "from .leaf import step\nfrom ..side import other\n",
        "inner/leaf.py": "from own_package import inner  # a circle\n\nstep = 1\n",
        "side.py": "other = 1\n",
        "unread.py": "other = 1\n",
        "../own_caller.py": "import own_package.inner as inner\n\n\nclass Mine:\n    pass\n",
    }.items():
        (package / name).write_text(text)
    kind = importlib.import_module("own_caller").Mine
    first = hash_code(kind)
    (package / "unread.py").write_text("other = 2\n")
    assert hash_code(kind) == first
    hashes = {first}
    for name in ("__init__.py", "inner/__init__.py", "inner/leaf.py", "side.py"):
        (package / name).write_text(f"{(package / name).read_text()}\nmore = 2\n")
        hashes.add(hash_code(kind))
    assert len(hashes) == 5
    assert all(is_comparable(code) for code in hashes) and not is_comparable("blake2b:0") and not is_comparable(None)


def test_a_class_without_a_file_is_refused_with_the_remedy() -> None:
    module = types.ModuleType("own_notebook")
    exec("class Mine:\n    pass\n", vars(module))  # noqa: S102 - as a notebook does
    with pytest.raises(UsageError, match="own_notebook:Mine is in no file: put the class into a module of its own"):
        hash_code(module.Mine)


class Failing:
    """A class of a user, which this test is."""

    def select(self) -> int:
        return int("x")


def test_the_innermost_line_of_the_users_is_to_blame_and_no_line_of_the_package() -> None:
    line, gstep = Failing.select.__code__.co_firstlineno + 1, type(make_pruner("gstep"))
    with pytest.raises(ValueError, match="invalid literal") as raised:
        Failing().select()
    assert locate_user_error(raised.value, Failing) == f"{__file__}:{line}"
    assert locate_user_error(raised.value, gstep) is None and is_user_class(Failing) and not is_user_class(gstep)
