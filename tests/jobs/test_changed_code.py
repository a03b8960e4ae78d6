"""A method of one's own whose code changes between two runs: refused, or all done again, never mixed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import ray
import torch

from jobs import evaluate, generate, inspect, merge, prune, remove, reprune, verify
from pipeline import TokenCache
from pipeline.cache.header import read_header
from pipeline.generate.answers import read_answers
from pipeline.own_code import is_comparable
from pipeline.prune.table import CacheTable
from pipeline.runner.cluster.prefork.server import start_server
from tests.builders.answers import tiny_cache, write_questions
from tests.builders.clusters import growing_ray
from tests.builders.runs import environment, forbid_ray, said_by
from tests.jobs.faults import tiny_videos
from tests.jobs.test_own_method import CODE
from tests.paths import ROOT, python_path

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


def write(module: Path, code: str) -> Path:
    """Write a module of a user, as if this process had begun after that."""
    module.write_text(code)
    shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)
    sys.modules.pop(module.stem, None)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the module, which this process and the workers of a cluster find."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", python_path(ROOT, folder))  # of the workers
        # A server of this file's own: the server that this process has was started with another PYTHONPATH, and would
        # fork none of these workers.
        server, path = start_server.__wrapped__(), os.environ["PYTHONPATH"]
        patch.setattr("tests.builders.clusters.fork_server", lambda: server)
        patch.setattr("tests.builders.clusters.environment", partial(environment, PYTHONPATH=path))
        with growing_ray({"num_cpus": 2}):
            yield folder
    assert not ray.is_initialized()


@pytest.fixture
def own(place) -> Path:
    """The module of the method, which changes while this process lives."""
    return write(place / "norms.py", METHOD)


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    tiny_videos(folder, 3)
    return folder


def pruned(videos: Path, out: Path, *options: str, code: int = 0) -> str:
    """What the command says."""
    return said_by(prune, videos, "--out", out, "--num-frames", 2, "--pruner", "norms:Mine", *options, code=code)


def kept_largest(out: Path) -> set[bool]:
    """Whether the first token of each video is larger than the last one."""
    cache = TokenCache(out)
    norms = [cache.get(name, order="selection").tokens.double().norm(dim=1) for name in cache.video_ids]
    return {bool(norm[0] > norm[-1]) for norm in norms}


def test_other_code_is_refused_with_its_file_and_redo_makes_the_whole_cache_again(own, videos, tmp_path, monkeypatch):
    """A redo that is stopped half way leaves a cache of one code, too."""
    out = tmp_path / "c"
    pruned(videos, out)
    assert kept_largest(out) == {True}
    first = read_header(TokenCache(out).store)["identity"]["pruner"]["code"]
    write(own, METHOD.replace('"""A method."""', "# Another comment\n\n"))
    assert "nothing to do" in pruned(videos, out)

    write(own, SMALLEST)
    said = pruned(videos, out, code=2)
    assert f"norms:Mine in {own}" in said and "--on-changed redo, or name another --out" in said
    (videos / "v999.mp4").write_bytes((videos / "v000.mp4").read_bytes())
    assert "other code" in pruned(videos, out, code=2)  # nothing is put beside what the old code made
    (videos / "v999.mp4").unlink()
    (tmp_path / "ids.txt").write_text("v002.mp4")
    said_by(remove, out, "--ids", tmp_path / "ids.txt", "--reason", "rights", "--keep-minutes", "0")
    pruned(videos, out, "--on-changed", "redo", "--dry-run")
    assert kept_largest(out) == {True}
    (tmp_path / "wrong.txt").write_text("v777.mp4")
    unknown = pruned(videos, out, "--on-changed", "redo", "--redo", str(tmp_path / "wrong.txt"), code=2)
    assert "1 of its ids have no row" in unknown and kept_largest(out) == {True}  # nothing was begun anew
    alone = pruned(videos / "v000.mp4", out, "--on-changed", "redo", code=2)
    assert "has 1 videos that" in alone and "e.g. v001.mp4: name them too, or another --out" in alone

    with monkeypatch.context() as patch:
        commit, commits = CacheTable.commit, count(1)

        def commit_one_video(table, number, rows):
            if next(commits) == 1:
                commit(table, number, rows.slice(0, 1))  # a slow driver is given both shards as one
            raise ZeroDivisionError

        patch.setattr(CacheTable, "commit", commit_one_video)
        with pytest.raises(ZeroDivisionError):
            pruned(videos, out, "--on-changed", "redo", "--videos-per-shard", "1")
    assert len(TokenCache(out).video_ids) == 1 and kept_largest(out) == {False}

    said = pruned(videos, out)  # what was begun anew goes on without a word
    assert "1 videos in" in said and kept_largest(out) == {False}
    cache = TokenCache(out)
    assert cache.video_ids == ["v000.mp4", "v001.mp4"] and not cache.foreign_files
    assert cache.metadata("v002.mp4")["status"] == "removed"
    assert cache.identity["pruner"]["code"] != first
    assert "nothing to do" in pruned(videos, out)
    said_by(verify, out)


def test_a_run_records_a_method_and_who_reads_the_cache_needs_no_such_module(place, videos, tmp_path, monkeypatch):
    """The method of the page of gstep."""
    (place / "mine.py").write_text(CODE[0])
    cache = tmp_path / "c"
    argv = [str(videos), "--out", str(cache), "--num-frames", "3", "--pruner", "mine:Mine", "--pruner-param", "p=1"]
    said_by(prune, *argv)
    pruner = read_header(TokenCache(cache).store)["identity"]["pruner"]
    declares = {"nested": True, "merges": False, "exact": True, "reorders": False}
    assert pruner.pop("code").startswith("modules:")
    assert pruner == {"method": "mine:Mine", "params": {"p": 1.0}, "declares": declares}
    norms = TokenCache(cache).get("v000.mp4", order="selection").tokens.double().norm(p=1, dim=1)
    assert (norms.diff() <= 0).all() and len(norms) == 3 * 196 // 4

    forbid_ray(monkeypatch)
    assert prune.main(argv) == 0  # nothing is left to do
    assert "pruner.params.p: the cache has 1.0, this run 2.0" in said_by(prune, *argv, "--pruner-param", "p=2", code=2)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(place)])
    sys.modules.pop("mine")
    assert "method 'mine:Mine' cannot be imported: ModuleNotFoundError" in said_by(prune, *argv, code=2)
    for command, options in ((verify, []), (inspect, ["v000.mp4"]), (inspect, [])):
        read = said_by(command, cache, *options)
    assert "mine:Mine" in read
    assert "what a cache says chooses no code" in said_by(verify, cache, "--live", "1", "--video-root", "/", code=2)


@pytest.fixture
def whole(tmp_path) -> Path:
    tiny_cache(tmp_path / "whole", ("a", "b"), ratio=1.0, method="none")
    return tmp_path / "whole"


ASKED = [{"question_id": v, "video_id": v, "prompt": "Which?", "choices": ["x", "y", "z"], "answer": "x"} for v in "ab"]


def scored(out: Path) -> dict[tuple[str, str], tuple[list[float], str]]:
    rows = read_answers(out / "answers").to_pylist()
    return {(row["pruning"], row["question_id"]): (row["choice_scores"], row["run_id"]) for row in rows}


def test_an_evaluation_asks_only_what_the_changed_method_had_answered(own, whole, tmp_path):
    questions, out = write_questions(tmp_path / "q.jsonl", ASKED), tmp_path / "r"
    argv = ["--benchmark", str(questions), "--cache", str(whole), "--out", str(out), "--draws", "100"]
    argv += ["--method", "gstep", "norms:Mine", "--retention-ratio", "0.1"]

    said_by(evaluate, *argv)
    first = scored(out)
    write(own, SMALLEST)
    said = said_by(evaluate, *argv, code=2)
    assert f"norms:Mine in {own}" in said and "--on-changed redo" in said
    assert scored(out) == first
    said_by(evaluate, *argv, "--on-changed", "redo")
    second = scored(out)
    mine = {key for key in first if key[0] == "norms:Mine@0.1"}
    assert len(mine) == 2 and all(second[key][0] != first[key][0] for key in mine)
    assert {key: second[key] for key in second.keys() - mine} == {key: first[key] for key in first.keys() - mine}
    assert "nothing to do" in said_by(evaluate, *argv) and scored(out) == second
    write(own, METHOD)  # the answers of this code are still there
    assert "nothing to do" in said_by(evaluate, *argv, "--on-changed", "redo") and scored(out) == first
    assert "nothing to do" in said_by(evaluate, *argv)


def test_a_repruned_cache_is_made_again_by_other_code(own, whole, tmp_path):
    out = tmp_path / "small"
    method = ("--pruner", "norms:Mine", "--retention-ratio", "0.25")
    argv = (whole, "--out", out, *method)
    said_by(reprune, *argv)
    assert kept_largest(out) == {True}
    write(own, SMALLEST)
    assert f"norms:Mine in {own}" in said_by(reprune, *argv, code=2)
    said_by(reprune, *argv, "--on-changed", "redo")
    assert kept_largest(out) == {False} and not TokenCache(out).foreign_files
    write(own, METHOD)
    said_by(reprune, whole, "--out", tmp_path / "other", *method)
    assert "pruner.code" in said_by(merge, out, tmp_path / "other", "--out", tmp_path / "both", code=2)


@pytest.mark.parametrize("older", [{}, {"code": "blake2b:0123456789abcdef"}], ids=["no-hash", "hash-of-another-form"])
def test_a_cache_that_does_not_say_its_code_is_gone_on_with_and_redo_makes_it_say(own, videos, tmp_path, older):
    """As versions before wrote it."""
    out = tmp_path / "c"
    pruned(videos, out)
    store = TokenCache(out).store
    identity = read_header(store)["identity"]
    del identity["pruner"]["code"]
    identity["pruner"] |= older
    shutil.rmtree(out)
    tiny_cache(out, ("v000.mp4",), identity=identity, deepstack_levels=0)
    said_by(inspect, str(out))
    assert "2 videos in" in pruned(videos, out, "--on-changed", "skip")
    assert len(TokenCache(out).video_ids) == 3 and not TokenCache(out).foreign_files
    assert read_header(store)["identity"]["pruner"].get("code") == older.get("code")
    pruned(videos, out, "--on-changed", "redo")
    assert is_comparable(read_header(store)["identity"]["pruner"].get("code")) and len(TokenCache(out).video_ids) == 3


BUG = METHOD.replace("return tokens.flatten", "tokens = tokens.flipp(0)\n    return tokens.flatten")
LINE = BUG[: BUG.index("tokens.flipp")].count("\n") + 1


def test_a_bug_in_a_method_ends_the_run_at_its_first_video_with_file_and_line(own, videos, whole, tmp_path):
    write(own, BUG)
    said = pruned(videos, tmp_path / "c", code=1)
    (why,) = re.findall("failed: (.*)", said)
    assert f"{own}:{LINE}: AttributeError: 'Tensor' object has no attribute 'flipp', in the method norms" in why
    questions, pruner = write_questions(tmp_path / "q.jsonl", ASKED), ("--pruner", "norms:Mine")
    argv = (whole, "--questions", questions, "--out", tmp_path / "answers", *pruner, "--retention-ratio", "0.1")
    assert f"{own}:{LINE}: AttributeError" in said_by(generate, *argv, code=1)
    said = said_by(reprune, whole, "--out", tmp_path / "small", *pruner, code=1)
    assert f"{own}:{LINE}: AttributeError" in said

    write(own, METHOD)  # the same commands go on: nothing was made with the bug
    pruned(videos, tmp_path / "c")
    assert kept_largest(tmp_path / "c") == {True}
    said_by(generate, *argv)
    first = scored(tmp_path)
    write(own, SMALLEST)
    assert "--on-changed redo" in said_by(generate, *argv, code=2)
    said_by(generate, *argv, "--on-changed", "redo")
    second = scored(tmp_path)
    assert first.keys() == second.keys() and all(second[key][0] != first[key][0] for key in first)


DECODER = """
from pipeline.video.decoders import PyavDecoder

SHADE = 1


class Shaded(PyavDecoder):
    version = "1"

    def read(self, indices):
        for frames in super().read(indices):
            yield frames // SHADE
"""


def test_videos_that_other_code_of_a_decoder_read_are_refused_skipped_or_read_again(own, videos, tmp_path):
    file, out = own.with_name("shades.py"), tmp_path / "c"
    argv = [str(videos), "--out", str(out), "--num-frames", "2", "--decoder", "shades:Shaded"]

    def read(text: str, *options: str, code: int = 0) -> str:
        write(file, text)
        return said_by(prune, *argv, *options, code=code)

    def tokens() -> torch.Tensor:
        return TokenCache(out).get("v000.mp4").tokens

    read(DECODER)
    first = tokens()
    assert "nothing to do" in read(f"# the same\n{DECODER}")
    darker = DECODER.replace("SHADE = 1", "SHADE = 4")
    assert "v000.mp4: its decoder shades:Shaded has other code now" in read(darker, code=2)
    assert "nothing to do" in read(darker, "--on-changed", "skip") and torch.equal(tokens(), first)
    read(darker, "--on-changed", "redo")
    assert not torch.equal(tokens(), first) and "nothing to do" in read(darker)

    argv += ["--out", str(tmp_path / "new")]
    read(darker.replace("frames // SHADE", "frames.halved()"), code=1)
    row = TokenCache(tmp_path / "new").metadata("v000.mp4")
    said = f"{file}:12: AttributeError: 'numpy.ndarray' object has no attribute 'halved', in the decoder shades:Shaded"
    assert (row["error_class"], row["error_stage"], row["error_message"]) == ("own-code", "decode", said)
