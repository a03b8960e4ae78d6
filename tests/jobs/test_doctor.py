"""jobs.doctor: its list, its exit code, and a node with another version of a package."""

import json
from datetime import timedelta

import pytest

from jobs import doctor
from pipeline.storage.stores import LocalStore
from tests.builders.clips import sample
from tests.builders.clusters import ray_here
from tests.builders.runs import run_here, said_by
from tests.paths import ROOT, python_path

CLIP = str(sample("bikes.mp4"))


class Spoken:
    """A doctor that looks at nothing."""

    def __init__(self, config, say):
        say("joining the Ray cluster at [fe80::1]:6379")

    def iter_findings(self):
        return iter(())


def test_an_address_in_brackets_is_no_markup(monkeypatch):
    monkeypatch.setattr("pipeline.doctor.doctor.Doctor", Spoken)
    assert "at [fe80::1]:6379" in said_by(doctor)


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
    full = {"RAY_local_fs_capacity_threshold": "0.0001"}  # so that Ray takes its disk for full
    other = {"num_cpus": 1, "env_vars": {"PYTHONPATH": python_path(tmp_path / "other", ROOT), **full}}
    argv = ["--num-frames", "2", "--out", str(tmp_path / "cache"), CLIP]
    with ray_here({"num_cpus": 1}, other):
        shown = run_here(doctor, argv)
        capfd.readouterr()
        age = LocalStore.compute_age
        monkeypatch.setattr(LocalStore, "compute_age", lambda store, name: age(store, name) + timedelta(hours=1))
        assert doctor.main([*argv, "--json", "--model", str(tmp_path / "no-model")]) == 1
        listed = json.loads(capfd.readouterr().out)
    lines = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    states = {words[1]: words[0] for words in lines if words[0] in {"ok", "slow", "wrong", "unknown"}}
    assert shown.returncode == 1 and not (tmp_path / "cache").exists()
    assert states["versions"] == "wrong" and states["gpu"] == states["balance"] == "unknown"
    assert states["model"] == states["decoding"] == states["encode"] == "ok" and states["store"] in {"ok", "slow"}
    assert (states["parity"], states["settings"]) == ("unknown", "ok")
    assert "not checked: the family llava_onevision brings no comparison" in " ".join(shown.stdout.split())
    assert "PyAV has no decoder for vp9" in shown.stdout and "av 99.0 on " in shown.stdout
    assert {"name", "state", "says", "remedy"} == set(listed[0])
    disks = {found["state"]: found["says"] for found in listed if found["name"].startswith("disk (")}
    assert disks.keys() == {"ok", "wrong"} and "; Ray spills up to 0%" in disks["wrong"]
    assert len([words for words in lines if words[1:3] == ["object", "store"]]) == 2
    assert len([words for words in lines if words[:2] == ["ok", "decoding"]]) == 3  # the driver, and each node
    wrong = {found["name"].split(" (")[0]: found for found in listed if found["state"] == "wrong"}
    assert set(wrong) == {"versions", "codecs", "disk", "store", "model"}
    assert all(found["remedy"] for found in wrong.values())
    unknown = {found["name"]: found["says"] for found in listed if found["state"] == "unknown"}
    assert unknown["settings"] == "not checked: they need a model"
    assert "no-model" in wrong["model"]["says"] and "a file just put is 36" in wrong["store"]["says"]
