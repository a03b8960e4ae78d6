"""The examples of ``pipeline/examples`` run as they stand; own_llm.py in cache/test_reader.py, read_coded.py in
cache/test_writer.py, own_stages.py in test_from_python.py."""

from contextlib import suppress

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.clips import sample
from tests.examples import run_example
from tests.paths import ROOT


def test_each_example_has_a_test():
    known = {"own_llm.py", "own_stages.py", "one_video.py", "read_coded.py", "train.py"}
    assert {path.name for path in (ROOT / "pipeline" / "examples").glob("*.py")} == known


def test_a_video_becomes_a_picture_of_what_was_kept(tmp_path, monkeypatch, capsys):
    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    run_example("pipeline/examples/one_video.py", sample("bikes.mp4"))
    assert capsys.readouterr().out == "392 of 1568 tokens are kept, see kept.png\n"
    assert plt.imread("kept.png").std() > 0.1


def test_a_probe_learns_how_far_a_token_is_into_its_own_video_and_goes_on_where_it_was_stopped(
    tmp_path, monkeypatch, capsys
):
    """Whatever the other video of its batch: no two are of one length."""
    store, lengths = write_header(tmp_path / "cache"), {f"v{n}": n for n in range(1, 13)}
    items = [encoded(name, random_tokens(n, (n, 25, 16)), 0.25, "gstep") for name, n in lengths.items()]
    for number in range(6):
        write_shard(store, f"run{number}", *items[number::6])
    names = run_example("pipeline/examples/train.py", tmp_path / "cache", tmp_path / "probe.pt")
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.split()[-1]) for line in lines]
    assert len(errors) == 20 and errors[-1] < errors[0]
    batch = names["batch"]
    assert len(batch.video_ids) == 2
    for video_id, first, end in zip(batch.video_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        expected = batch.frame[first:end] / max(1, lengths[video_id] - 1)
        assert torch.equal(names["place"][first:end], expected)

    # Workers of a loader that is left are waited for as long where it is collected: 5 s each, by default.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    # Stopped where saving fails, in the middle of an epoch and behind its end, and gone on with.
    save = torch.save
    for n_saves in 4, 100:
        left = iter(range(n_saves))

        def limited(*arguments, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            save(*arguments)

        monkeypatch.setattr(torch, "save", limited)
        with suppress(KeyboardInterrupt):
            run_example("pipeline/examples/train.py", tmp_path / "cache", tmp_path / "again.pt")
    assert capsys.readouterr().out.splitlines() == lines
