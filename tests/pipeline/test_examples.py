"""The examples of ``pipeline/examples`` run as they stand; own_llm.py in cache/test_own_llm.py, own_stages.py in
test_from_python.py."""

import matplotlib as mpl
import matplotlib.pyplot as plt

from tests.examples import run_example
from tests.paths import ROOT
from tests.pipeline.asking import tiny_cache
from tests.pipeline.videos import sample


def test_each_example_has_a_test():
    known = {"own_llm.py", "own_stages.py", "one_video.py", "train.py"}
    assert {path.name for path in (ROOT / "pipeline" / "examples").glob("*.py")} == known


def test_a_video_becomes_a_picture_of_what_was_kept(tmp_path, monkeypatch, capsys):
    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    run_example("pipeline/examples/one_video.py", sample("bikes.mp4"))
    assert capsys.readouterr().out == "392 of 1568 tokens are kept, see kept.png\n"
    assert plt.imread("kept.png").std() > 0.1


def test_a_probe_learns_from_a_cache(tmp_path, capsys):
    tiny_cache(tmp_path / "cache", ("a", "b", "c"))
    run_example("pipeline/examples/train.py", tmp_path / "cache")
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(errors) == 20 and errors[-1] < errors[0]
