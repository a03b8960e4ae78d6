"""The command of all benchmarks: what cannot be measured is refused."""

import pytest

from jobs.benchmark import __main__ as benchmark
from tests.builders import checkpoints
from tests.builders.runs import forbid_models
from tests.interpreter import run_python


def test_help_loads_no_torch():
    done = run_python("-X", "importtime", "-m", "jobs.benchmark", "--help", check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "rich" in loaded and not loaded & {"torch", "ray", "pyarrow", "transformers", "matplotlib"}
    assert all(name in done.stdout for name in benchmark.MEASUREMENTS)


REFUSED = [
    ("selection --frames 0", "at least 1"),
    ("selection --retention-ratios 2", "in (0, 1], got 2.0; did you mean 2%?"),
    ("selection --inputs noise", "noise"),
    ("selection --device cuda", "sees no CUDA device"),
    ("serving --plot no-such-folder/ways.png", "there is no folder"),
    ("decode --fps 0", "not a positive number"),
    ("decode --clips mpeg1-720p-10s-g30", "such as h264-720p-10s-g250"),
    ("pipeline --driver 100 100", "--driver takes two different numbers"),
    ("generic --model smolvlm", "nothing to compare"),  # it has no code of its own
    ("efficiency --model tiny --method fastv", "this model has 2 layers"),
    ("efficiency --method gstep --siglip tiny", "none of the methods takes anything from a SigLIP"),
    ("efficiency --method gstep,positions=original", "positions change no cost"),
    ("efficiency --device cpu --attn flash_attention_2", "runs on cuda"),
    ("efficiency --videos /no/such/folder", "no such folder"),
]


@pytest.mark.parametrize(("argv", "said"), REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    if "smolvlm" in argv:
        checkpoints.make("smolvlm", tmp_path / "smolvlm")
    forbid_models(monkeypatch)
    try:
        code = benchmark.main(argv.split())
    except SystemExit as ended:  # argparse's
        code = ended.code
    assert code == (1 if "--videos" in argv else 2)
    assert said in " ".join(capsys.readouterr().err.split())
