"""Options in Python's types, refused by name, recorded without secrets; --max-failed; the hash of a user's own code."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gstep import make_pruner
from jobs.reprune import RepruneConfig
from pipeline.errors import UsageError
from pipeline.evaluate.config import EvaluateConfig
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import describe_engine
from pipeline.options import make_config
from pipeline.own_code import hash_code, is_comparable, is_user_class, locate_user_error
from pipeline.prune.config import PruneConfig


def test_options_are_those_of_the_command_in_pythons_types(tmp_path):
    given = {"out": tmp_path, "video_root": [tmp_path], "retention_ratio": 1, "pruner_param": {"alpha": 0.5, "e": None}}
    config = make_config(PruneConfig, "f", given)
    assert (config.out, config.video_root) == (str(tmp_path), [str(tmp_path)])
    assert (config.retention_ratio, config.pruner_params()) == (1.0, {"alpha": "0.5", "e": "none"})


@pytest.mark.parametrize(("given", "ratio"), [("25%", 0.25), ("12.5 %", 0.125), (0.1, 0.1), ("100%", 1.0)])
def test_a_share_may_be_a_percentage(given, ratio):
    assert make_config(PruneConfig, "f", {"retention_ratio": given}).retention_ratio == ratio
    both = make_config(EvaluateConfig, "f", {"benchmark": "shapes", "data": "d", "retention_ratio": [given, 0.05]})
    assert both.retention_ratio == [ratio, 0.05]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retention_ration": 0.5}, r"f\(\): unknown option retention_ration; did you mean retention_ratio\?"),
        ({"pruner_param": "alpha=1"}, r"f\(\): pruner_param must be a list of texts"),
        ({"retention_ratio": "0.25"}, r"f\(\): retention_ratio must be a number, got '0.25'"),
        ({"retention_ratio": "x%"}, r"f\(\): retention_ratio must be a number, got 'x%'"),
        ({"fps": "25%"}, r"f\(\): fps must be a number, got '25%'"),
        ({"decode_timeout": 10**400}, r"f\(\): decode_timeout must be a number, got 10000"),
        ({"retention_ratio": 2.0}, r"--retention-ratio must be in \(0, 1\], got 2.0"),
        ({"dry_run": True}, r"f\(\) takes no dry_run, which is for the command"),
    ],
)
def test_other_options_and_values_are_refused_by_name(options, said):
    with pytest.raises(UsageError, match=said):
        make_config(PruneConfig, "f", options)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PruneConfig, {"retention_ratio": 25}),
        (EvaluateConfig, {"benchmark": "shapes", "retention_ratio": [0.1, 25]}),
        (RepruneConfig, {"whole": "w", "out": "o", "retention_ratio": 25}),
    ],
)
def test_a_percentage_without_its_sign_is_named(config, options):
    with pytest.raises(UsageError, match=r"--retention-ratio must be in \(0, 1\], got 25(.0)?; did you mean 25%\?"):
        config(**options)


@pytest.mark.parametrize(
    ("text", "total", "limit", "from_outside"),
    [
        (None, 10, 9, 10), (None, 20, 19, 10), (None, 200, 199, 10), (None, 400, 399, 20), ("0", 10, 0, 0),
        ("3", 400, 3, 3), ("0.25", 10, 2, 2), ("50%", 400, 200, 200), ("1.0", 10, 10, 10),
        ("1e-05", 10**6, 10, 10), ("2.5E-1", 10, 2, 2),
    ],
)  # fmt: skip
def test_so_many_videos_may_fail_and_so_many_from_outside(text, total, limit, from_outside):
    config = PruneConfig(max_failed=text)
    assert (config.compute_failure_limit(total), config.compute_infrastructure_limit(total)) == (limit, from_outside)


def test_a_model_that_takes_more_gpus_than_a_run_may_is_refused():
    options = {"questions": "q", "engine": "vllm", "tensor_parallel": 8}
    assert GenerateConfig(**options, max_gpus=8).max_gpus == 8
    with pytest.raises(UsageError, match="--max-gpus 4 does not suffice for one model of --tensor-parallel 8"):
        GenerateConfig(**options, max_gpus=4)


def test_a_record_tells_no_secret():
    for endpoint, shown in ("http://store.example:9000", "(set)"), (None, None):
        assert PruneConfig(s3_endpoint=endpoint).as_record()["s3_endpoint"] == shown
    params = ["hf_token=hf_abc", "hf-token=x", "max_num_batched_tokens=8192"]
    config = GenerateConfig(questions="q", engine="vllm", engine_param=params)
    shown = ["hf_token=(set)", "hf-token=(set)", "max_num_batched_tokens=8192"]
    assert config.as_record()["engine_param"] == config.list_changed_values()["engine_param"] == shown
    assert config.engine_params()["hf_token"] == "x"
    assert describe_engine(config) == {"engine": {"name": "vllm"}}  # which the header of the answers has


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
    assert first == "modules:feb6c4445a2172233bbbe46de391bf3b"  # as caches state it, whatever the version of Python
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
