"""The weights of a node: downloaded once for all its encoders, or before they start, and then read without a hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gstep.checkpoints import tiny
from tests.paths import ROOT
from tests.pipeline.hub import COMMIT, REPO, HubServer

ENCODER = f"""
from gstep.backbones import ModelSource, choose_runtime, family_of
source = ModelSource.resolve("{REPO}")
print(source.identity, family_of(source).load(choose_runtime("cpu", "float32")) is not None)
"""


@pytest.fixture
def hub(tmp_path):
    with HubServer(tiny.build("tiny")) as server:
        yield server


@pytest.fixture
def node(tmp_path, hub):
    """Starts a process of a node whose HF_HOME was empty."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    here |= {"HF_HOME": str(tmp_path / "models"), "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT)}

    def start(*argv, **more):
        return subprocess.Popen(argv, env={**here, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def test_two_encoders_of_a_node_download_the_weights_once(hub, node):
    encoders = [node(sys.executable, "-c", ENCODER) for _ in range(2)]
    said = [one.communicate(timeout=120)[0] for one in encoders]
    assert [one.returncode for one in encoders] == [0, 0], said
    assert hub.downloads.count("model.safetensors") == 1


def test_weights_that_were_downloaded_before_need_no_hub_and_no_token(hub, node):
    program = str(Path(sys.executable).with_name("hf"))
    first = node(program, "download", REPO)
    assert first.communicate(timeout=120)[0] and first.returncode == 0
    hub.requests.clear()
    encoder = node(sys.executable, "-c", ENCODER, HF_HUB_OFFLINE="1")
    said, _ = encoder.communicate(timeout=120)
    assert encoder.returncode == 0 and f"hub:{REPO}@{COMMIT} True" in said, said
    assert hub.requests == []
