"""A method of one's own, from the page of gstep to a cache: the block there is the file that these tests run."""

import importlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import gstep
from jobs import prune
from tests.builders.answers import tiny_cache
from tests.builders.clips import sample
from tests.builders.runs import forbid_ray, said_by
from tests.gstep.synthetic import assert_same, video
from tests.jobs.faults import begin_forked
from tests.paths import ROOT

SECTION = (ROOT / "gstep/README.md").read_text().split("## Add a method\n")[1].split("\n## ")[0]
CODE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A folder with the README's file, in which this process finds it."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE[0])
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("mine", None)


def test_the_readmes_method_prunes_as_an_object_and_by_its_path(mine):
    assert len(CODE) == 1 and not mine.joinpath("__init__.py").exists()
    from mine import Mine  # noqa: PLC0415

    tokens = video(5, 13, 8)
    for p in (1.0, 2.0):
        norms = torch.linalg.vector_norm(tokens.flatten(0, 1).double(), ord=p, dim=1)
        best = norms.argsort(descending=True)[:13]
        own = gstep.prune(tokens, 0.2, method=Mine(p=p))
        assert own.index[own.compute_selection_order()].tolist() == best.tolist()
        assert_same(gstep.prune(tokens, 0.2, "mine:Mine", p=p), own)
        assert_same(gstep.prune(tokens, 0.6, "mine:Mine", p=p).at(0.2), own)
    with pytest.raises(ValueError, match=r"'mine:Mine': p must be a number; got 'abc'"):
        gstep.prune(tokens, method=Mine(p="abc"))


def test_a_file_and_a_line_make_it_a_method_of_the_package(tmp_path):
    """In a copy of the checkout, where the contract tests then take it in by themselves."""
    copy = tmp_path / "copy"
    for room in ("gstep", "tests/gstep", "pipeline", "jobs"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "gstep/pruners/mine.py").write_text(CODE[0])
    table, line = copy / "gstep/methods.py", '"mine": "gstep.pruners.mine:Mine",'
    assert f"`{line}`" in SECTION
    table.write_text(table.read_text().replace('    "none":', f'    {line}\n    "none":'))
    log = tmp_path / "log"
    pid = os.fork()  # what is loaded already takes seconds to load
    if pid == 0:
        begin_forked(str(log), {})
        for name in [name for name in sys.modules if name.partition(".")[0] in {"gstep", "tests", "pipeline", "jobs"}]:
            del sys.modules[name]
        sys.path.insert(0, str(copy))
        os.chdir(copy)
        torch.set_num_threads(1)  # those of OpenMP are not there in a fork
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(copy)]
        os._exit(pytest.main(["tests/gstep/pruners/test_contract.py", *options, "-k", "mine and not cuda"]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, log.read_text()
    assert int(re.search(r"(\d+) passed", log.read_text()).group(1)) > 5


@pytest.mark.slow
def test_workers_that_lack_its_module_fail_the_run_with_its_name(one_ray, mine, tmp_path):
    """The driver has it, the nodes of the cluster do not."""
    (tmp_path / "videos").mkdir()
    shutil.copy(sample("bikes.mp4"), tmp_path / "videos")
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--num-frames", "3", "--pruner", "mine:Mine"]
    importlib.import_module("mine")
    sys.path.remove(str(mine))
    said = said_by(prune, *argv, code=1)
    (why,) = re.findall(r"failed: (.*)", said)
    assert "method 'mine:Mine' cannot be imported: ModuleNotFoundError" in why
    assert "importable on every machine that prunes" in why


def test_parameters_of_a_wrong_type_are_refused_before_a_run(mine, refuse, tmp_path, monkeypatch):
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    options = ["--retention-ratio", "0.2", "--pruner", "mine:Mine", "--pruner-param"]
    assert "unknown parameter q of method 'mine:Mine'; it accepts: p" in refuse(*options, "q=1")
    options, why = [*options, "p=abc"], "'mine:Mine': p must be a number; got 'abc'"
    assert why in refuse(*options)
    forbid_ray(monkeypatch)
    assert why in said_by(prune, sample("bikes.mp4"), "--out", tmp_path / "new", *options, code=2)
    assert not (tmp_path / "new").exists()
