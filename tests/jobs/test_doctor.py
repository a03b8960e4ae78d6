"""jobs.doctor: its list, its exit code, and a node with another version of a package."""

import json

import pytest

from jobs import doctor
from tests.jobs.jobs import run_here
from tests.paths import ROOT
from tests.pipeline.rays import ray_here
from tests.pipeline.videos import sample

CLIP = str(sample("bikes.mp4"))


def test_an_option_that_makes_no_sense_is_refused(capsys):
    assert doctor.main(["--num-frames", "0"]) == 2
    assert "--num-frames must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_node_with_another_version_and_a_model_that_is_not_there_are_wrong(tmp_path, capfd):
    (tmp_path / "other" / "av-99.0.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "av-99.0.dist-info" / "METADATA").write_text("Name: av\nVersion: 99.0\n")
    other = {"num_cpus": 1, "env_vars": {"PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}"}}
    with ray_here({"num_cpus": 1}, other):
        good = ["--num-frames", "2", "--out", str(tmp_path / "cache"), CLIP]
        assert doctor.main([*good, "--json"]) == 1
        listed = json.loads(capfd.readouterr().out)
        missing = run_here(doctor, [*good, "--model", str(tmp_path / "no-model")])
    assert {"name", "state", "says", "remedy"} == set(listed[0]) and all(
        one["remedy"] or one["state"] for one in listed
    )
    assert [one["says"] for one in listed if one["state"] == "wrong"] == [one["says"] for one in listed[1:2]]
    assert "av 99.0 on " in listed[1]["says"]
    states = {one["name"].split(" (")[0]: one["state"] for one in listed}
    assert states["store"] == states["decoding"] == states["encode"] == states["arithmetic"] == "ok"
    assert states["gpu"] == "unknown" and not (tmp_path / "cache").exists()
    assert missing.returncode == 1 and "no-model" in missing.stdout
