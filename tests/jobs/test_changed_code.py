"""A method of one's own whose code changes between two runs: refused, or all done again, never mixed."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import ray

from jobs import prune, remove, verify
from pipeline import TokenCache
from pipeline.cache.header import read_header
from pipeline.runner.prefork.server import start_server
from tests.jobs.faults import tiny_videos
from tests.jobs.jobs import environment, run_here
from tests.paths import ROOT
from tests.pipeline.rays import growing_ray

pytestmark = pytest.mark.slow

METHOD = '''
"""A method."""
from dataclasses import dataclass
from typing import ClassVar

from gstep.pruners.base import Pruner, Selection

LARGEST_FIRST = True


def rank(tokens):
    return tokens.flatten(0, 1).double().norm(dim=1).argsort(descending=LARGEST_FIRST, stable=True)


@dataclass(frozen=True, kw_only=True)
class Mine(Pruner):
    name: ClassVar[str] = "mine"
    nested: ClassVar[bool] = True

    def select(self, visual, budget, ratio, seed):
        return Selection(rank(visual.tokens)[:budget])
'''
SMALLEST = METHOD.replace("LARGEST_FIRST = True", "LARGEST_FIRST = False")


class Own:
    """The module ``norms`` of a user, which changes while this process lives."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "norms.py"
        self.write(METHOD)

    def write(self, code: str) -> None:
        """Write the module, as if this process had begun after that."""
        self.file.write_text(code)
        shutil.rmtree(self.file.parent / "__pycache__", ignore_errors=True)
        sys.modules.pop("norms", None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the module, which this process and the workers of a cluster find."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")  # of the workers
        server, path = start_server(), os.environ["PYTHONPATH"]
        patch.setattr("tests.pipeline.rays.fork_server", lambda: server)
        patch.setattr("tests.pipeline.rays.environment", partial(environment, PYTHONPATH=path))
        with growing_ray({"num_cpus": 2}):
            yield folder
    assert not ray.is_initialized()


@pytest.fixture
def own(place) -> Own:
    return Own(place)


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    tiny_videos(folder, 3)
    return folder


def pruned(videos: Path, out: Path, *options: str, code: int = 0) -> str:
    """What the command says."""
    argv = [str(videos), "--out", str(out), "--num-frames", "2", "--pruner", "norms:Mine", *options]
    done = run_here(prune, argv)
    assert done.returncode == code, done.stdout
    return " ".join(done.stdout.split())


def kept_largest(out: Path) -> set[bool]:
    """Whether the first token of each video is larger than the last one."""
    cache = TokenCache(out)
    norms = [cache.get(name, order="selection").tokens.double().norm(dim=1) for name in cache.video_ids]
    return {bool(norm[0] > norm[-1]) for norm in norms}


def test_other_code_is_refused_with_its_file_and_redo_makes_the_whole_cache_again(own, videos, tmp_path):
    out = tmp_path / "c"
    pruned(videos, out)
    assert kept_largest(out) == {True}
    first = read_header(TokenCache(out).store)["identity"]["pruner"]["code"]
    own.write(METHOD.replace('"""A method."""', "# Another comment\n\n"))
    assert "nothing to do" in pruned(videos, out)

    own.write(SMALLEST)
    said = pruned(videos, out, code=2)
    assert f"norms:Mine in {own.file}" in said and "--on-changed redo, or name another --out" in said
    (videos / "v999.mp4").write_bytes((videos / "v000.mp4").read_bytes())
    assert "other code" in pruned(videos, out, code=2)  # nothing is put beside what the old code made
    (videos / "v999.mp4").unlink()
    (tmp_path / "ids.txt").write_text("v002.mp4")
    gone = [str(out), "--ids", str(tmp_path / "ids.txt"), "--reason", "rights", "--keep-minutes", "0"]
    assert run_here(remove, gone).returncode == 0
    pruned(videos, out, "--on-changed", "redo", "--dry-run")
    assert kept_largest(out) == {True}
    alone = pruned(videos / "v000.mp4", out, "--on-changed", "redo", code=2)
    assert "holds 1 videos that" in alone and "e.g. v001.mp4: name them too, or another --out" in alone
    said = pruned(videos, out, "--on-changed", "redo")
    assert "2 videos in" in said and kept_largest(out) == {False}
    cache = TokenCache(out)
    assert cache.video_ids == ["v000.mp4", "v001.mp4"] and not cache.foreign_files
    assert cache.metadata("v002.mp4")["status"] == "removed"
    assert cache.identity["pruner"]["code"] != first
    assert "nothing to do" in pruned(videos, out)
    checked = run_here(verify, [str(out)])
    assert checked.returncode == 0, checked.stdout
