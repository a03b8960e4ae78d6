"""The measurements on a GPU (.ci/gpu), rehearsed on a CPU: a change of inner names shows here, without a GPU."""

from collections import defaultdict

import pytest

from tests.interpreter import run_python

TOWERS = {"llava", "qwen2.5", "qwen3", "internvl"}
OTHERS = "inputs machine prune loop table3 generic tests poison memory selection ray"


@pytest.mark.slow
def test_every_measurement_gives_its_figures_in_a_rehearsal(tmp_path):
    done = run_python(".ci/gpu", tmp_path, "--rehearse", "--deadline", 800)
    states, figures = {}, defaultdict(dict)
    for name, *label, value in (line.split(" | ") for line in (tmp_path / "report.txt").read_text().splitlines()):
        if label:
            figures[name][label[0]] = value
        else:
            states[name] = value.split(" after ")[0]
    names = {*TOWERS, *OTHERS.split()}
    wrong = [name for name in states if states[name] != "ok"]
    logs = "\n".join(f"{name}: {(tmp_path / f'{name}.log').read_text()[-3000:]}" for name in wrong)
    assert states == dict.fromkeys(names, "ok") and done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    assert figures.keys() == names
    for name in TOWERS:
        assert {"encoding", "pruning by itself", "all, videos in parallel", "kernels"} <= figures[name].keys()
        assert float(figures[name]["least cosine with the centered tokens of a CPU in float32"]) > 0.999
    for name in ("prune", "loop", "ray"):
        assert figures[name]["videos"] == "4" and any(label.startswith("speed from") for label in figures[name])
    assert figures["generic"].items() >= {("qwen3, generic, the same tokens both ways", "True")}
    columns = {"gstep 0.25, online prefill", "fastv,K=1 0.25, cached total", "none 1, online kv"}
    assert columns <= figures["table3"].keys()
    assert int(figures["tests"]["tests collected"]) > 50
    assert figures["poison"]["failures"] == '{"crash": 1}'
    assert figures["memory"]["kept tokens that are kept without the limit"] == "100 %"
    assert figures["memory"]["memory"] == "a CPU only raises the error"
