"""jobs.doctor: its list, its exit code, and a node with another version of a package."""

from datetime import timedelta

import pytest

from jobs import doctor
from pipeline.doctor.finding import Finding
from pipeline.storage.stores import LocalStore
from tests.builders.clips import sample
from tests.builders.clusters import ray_here
from tests.builders.runs import document_of, said_by
from tests.paths import ROOT, python_path

CLIP = str(sample("bikes.mp4"))


class Spoken:
    """A doctor that looks at nothing."""

    states = ()

    def __init__(self, config, say):
        say("joining the Ray cluster at [fe80::1]:6379")

    def iter_findings(self):
        return (Finding(state, state, "seen") for state in self.states)


def test_an_address_in_brackets_is_no_markup(monkeypatch):
    monkeypatch.setattr("pipeline.doctor.doctor.Doctor", Spoken)
    assert "at [fe80::1]:6379" in said_by(doctor)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_exit_code_says_whether_something_is_wrong(monkeypatch, wrong):
    monkeypatch.setattr("pipeline.doctor.doctor.Doctor", Spoken)
    monkeypatch.setattr(Spoken, "states", ("ok", "slow", "unknown", *["wrong"] * wrong))
    assert document_of(doctor, [])[0] == wrong


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
def test_a_node_with_another_version_a_missing_codec_and_a_lying_store_are_wrong(tmp_path, monkeypatch):
    (tmp_path / "other" / "av-99.0.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "sitecustomize.py").write_text(NO_VP9)
    (tmp_path / "other" / "av-99.0.dist-info" / "METADATA").write_text("Name: av\nVersion: 99.0\n")
    full = {"RAY_local_fs_capacity_threshold": "0.0001"}  # so that Ray takes its disk for full
    other = {"num_cpus": 1, "env_vars": {"PYTHONPATH": python_path(tmp_path / "other", ROOT), **full}}
    argv = ["--num-frames", "2", "--out", str(tmp_path / "cache"), CLIP]
    with ray_here({"num_cpus": 1}, other):
        age = LocalStore.compute_age
        monkeypatch.setattr(LocalStore, "compute_age", lambda store, name: age(store, name) + timedelta(hours=1))
        code, listed, shown = document_of(doctor, argv)
        _, without, _ = document_of(doctor, [*argv, "--model", str(tmp_path / "no-model")])
    assert code == 1 and not (tmp_path / "cache").exists() and "av 99.0 on " in shown
    assert {"name", "state", "says", "remedy"} == set(listed[0])
    kinds = [(found["name"].split(" (")[0], found["state"]) for found in listed]
    told = {("model", "ok"), ("encode", "ok"), ("parity", "unknown"), ("settings", "ok"), ("balance", "unknown")}
    assert set(kinds) >= told
    assert kinds.count(("decoding", "ok")) == 3  # the driver, and each node
    assert len([name for name, _ in kinds if name == "object store"]) == 2
    says = {kind: found["says"] for kind, found in zip(kinds, listed, strict=True)}
    assert says["parity", "unknown"].startswith("not checked: the family llava_onevision brings no comparison")
    assert "; Ray spills up to 0%" in says["disk", "wrong"] and ("disk", "ok") in says
    assert "PyAV has no decoder for vp9" in says["codecs", "wrong"]
    assert "a file just put is 36" in says["store", "wrong"]
    states = {found["name"]: (found["state"], found["says"]) for found in without}
    assert states["model"][0] == "wrong" and "no-model" in states["model"][1]
    assert states["settings"] == ("unknown", "not checked: they need a model")
    wrong = [found for found in listed if found["state"] == "wrong"]
    assert len(wrong) == 4 and "av 99.0 on " in says["versions", "wrong"] and all(found["remedy"] for found in wrong)
