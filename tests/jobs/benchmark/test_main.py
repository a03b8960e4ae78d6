"""The command of all benchmarks: what cannot be measured is refused."""

import pytest

from jobs.benchmark import __main__ as benchmark
from tests.interpreter import run_python


def test_help_loads_no_torch():
    done = run_python("-X", "importtime", "-m", "jobs.benchmark", "--help", check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "rich" in loaded and not loaded & {"torch", "ray", "pyarrow", "transformers", "matplotlib"}
    assert all(name in done.stdout for name in benchmark.MEASUREMENTS)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["selection", "--frames", "0"], "at least 1"),
        (["selection", "--retention-ratios", "2"], "in (0, 1], got 2.0; did you mean 2%?"),
        (["selection", "--retention-ratios", "nan"], "in (0, 1]"),
        (["selection", "--inputs", "noise"], "noise"),
        (["read", "--folder", "no-such-folder"], "there is no folder no-such-folder"),
        (["serving", "--plot", "no-such-folder/ways.png"], "there is no folder"),
        (["serving", "--plot", "/"], "is a folder"),
        (["decode", "--fps", "0"], "not a positive number"),
        (["decode", "--clips", "mpeg1-720p-10s-g30"], "such as h264-720p-10s-g250"),
        (["decode", "--clips", "h264-721p-10s-g30"], "in steps of 18"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, argv, said):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["selection", "--device", "cuda"], "sees no CUDA device"),
        (["pipeline", "--driver", "100", "100"], "--driver takes two different numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, monkeypatch, argv, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert benchmark.main(argv) == 2 and said in " ".join(capsys.readouterr().err.split())
