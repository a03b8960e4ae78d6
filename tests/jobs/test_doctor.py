"""jobs.doctor: its list, its exit code, and a node with another version of a package."""

import json
from datetime import timedelta

import pytest

from jobs import doctor
from pipeline.storage.stores import LocalStore
from tests.jobs.jobs import run_here
from tests.paths import ROOT
from tests.pipeline.rays import ray_here
from tests.pipeline.videos import sample

CLIP = str(sample("bikes.mp4"))


def test_an_option_that_makes_no_sense_is_refused(capsys):
    assert doctor.main(["--num-frames", "0"]) == 2
    assert "--num-frames must be at least 1" in capsys.readouterr().err
    assert doctor.main(["--dry-run"]) == 2
    assert "--plan and --dry-run are for jobs.prune" in " ".join(capsys.readouterr().err.split())


# On a node whose PyAV was built without a decoder of VP9.
NO_VP9 = """
import importlib.machinery, sys

class Hiding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "av.codec" or (spec := super().find_spec(name, path, target)) is None:
            return None
        run = spec.loader.exec_module
        def without(module):
            run(module)
            real = module.Codec
            def codec(name, mode):
                if name == "vp9":
                    raise ValueError("unknown codec")
                return real(name, mode)
            module.Codec = codec
        spec.loader.exec_module = without
        return spec

sys.meta_path.insert(0, Hiding)
"""


@pytest.mark.slow
def test_a_node_with_another_version_a_missing_codec_a_lying_store_and_no_model_are_wrong(tmp_path, capfd, monkeypatch):
    (tmp_path / "other" / "av-99.0.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "sitecustomize.py").write_text(NO_VP9)
    (tmp_path / "other" / "av-99.0.dist-info" / "METADATA").write_text("Name: av\nVersion: 99.0\n")
    other = {"num_cpus": 1, "env_vars": {"PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}"}}
    with ray_here({"num_cpus": 1}, other):
        good = ["--num-frames", "2", "--out", str(tmp_path / "cache"), CLIP]
        capfd.readouterr()  # what Ray said of the cluster of earlier tests, which has ended
        assert doctor.main([*good, "--json"]) == 1
        listed = json.loads(capfd.readouterr().out)
        age = LocalStore.age
        monkeypatch.setattr(LocalStore, "age", lambda store, name: age(store, name) + timedelta(hours=1))
        bad = run_here(doctor, [*good, "--model", str(tmp_path / "no-model")])
    assert {"name", "state", "says", "remedy"} == set(listed[0]) and all(
        one["remedy"] or one["state"] for one in listed
    )
    wrong = [one for one in listed if one["state"] == "wrong"]
    assert [one["name"].split(" (")[0] for one in wrong] == ["versions", "codecs"]
    assert "av 99.0 on " in wrong[0]["says"] and wrong[1]["says"] == "PyAV cannot decode vp9"
    states = {one["name"].split(" (")[0]: one["state"] for one in listed}
    assert states["store"] == states["decoding"] == states["encode"] == states["arithmetic"] == "ok"
    assert states["gpu"] == "unknown" and not (tmp_path / "cache").exists()
    page = " ".join(bad.stdout.split())
    assert bad.returncode == 1 and all(said in page for said in ("no-model", "is 3600 s old", "decode vp9", "av 99.0"))
