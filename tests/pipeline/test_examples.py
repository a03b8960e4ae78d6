"""The examples of ``pipeline/examples`` run as they stand; own_llm.py in cache/test_own_llm.py, read_coded.py in
cache/test_codecs.py, own_stages.py in test_from_python.py."""

import itertools
from contextlib import suppress

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.clips import sample
from tests.examples import run_example
from tests.paths import ROOT
from tests.pipeline.datasets.caches import make_shards


def test_each_example_has_a_test():
    known = {"own_llm.py", "own_stages.py", "one_video.py", "read_coded.py", "train.py"}
    assert {path.name for path in (ROOT / "pipeline" / "examples").glob("*.py")} == known


def test_a_video_becomes_a_picture_of_what_was_kept(tmp_path, monkeypatch, capsys):
    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    run_example("pipeline/examples/one_video.py", sample("bikes.mp4"))
    assert capsys.readouterr().out == "392 of 1568 tokens are kept, see kept.png\n"
    assert plt.imread("kept.png").std() > 0.1


def test_a_probe_learns_from_a_cache_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    make_shards(tmp_path / "cache")
    run_example("pipeline/examples/train.py", tmp_path / "cache", tmp_path / "probe.pt")
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.split()[-1]) for line in lines]
    assert len(errors) == 20 and errors[-1] < errors[0]
    # Stopped where saving fails, in the middle of an epoch and behind its end, and gone on with.
    save, left = torch.save, iter((4, 1, 0, 100))
    for saves in left:
        monkeypatch.setattr(torch, "save", stopping(save, saves))
        with suppress(KeyboardInterrupt):
            run_example("pipeline/examples/train.py", tmp_path / "cache", tmp_path / "again.pt")
    assert capsys.readouterr().out.splitlines() == lines


def test_a_probe_learns_how_far_a_token_is_into_its_own_video(tmp_path):
    """Whatever the other video of its batch: no two are of one length."""
    lengths = {"a": 9, "b": 3, "c": 1, "d": 5}
    store = write_header(tmp_path / "cache")
    write_shard(store, "run", *(encoded(v, random_tokens(n, (n, 25, 16)), 0.25, "gstep") for v, n in lengths.items()))
    names = run_example("pipeline/examples/train.py", tmp_path / "cache", tmp_path / "probe.pt")
    batch = names["batch"]
    assert len(batch.video_ids) == 2
    for video_id, first, end in zip(batch.video_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        expected = batch.frame[first:end] / max(1, lengths[video_id] - 1)
        assert torch.equal(names["place"][first:end], expected)


def stopping(save, n_saves: int):
    """Return ``save``, which works so many times."""
    left = itertools.repeat(None, n_saves)

    def limited(*arguments):
        try:
            next(left)
        except StopIteration:
            raise KeyboardInterrupt from None
        save(*arguments)

    return limited
