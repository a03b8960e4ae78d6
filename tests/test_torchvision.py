"""The torchvision of the tests: it imports in each process, and is the installed package where that is sound."""

import os
import re
import sys

import pytest
import torch

from tests.interpreter import run_python
from tests.paths import ROOT, TORCHVISION

SHAPE = [4, 4, 24]  # frames are encoded in pairs


def process_video() -> tuple[list[int], bool]:
    """Return what a video processor of transformers makes of frames, and whether the whole of torchvision is there."""
    import torchvision  # noqa: PLC0415 - in a worker of Ray
    from transformers import Qwen2VLVideoProcessor  # noqa: PLC0415

    frames = torch.zeros(8, 3, 56, 336, dtype=torch.uint8)
    made = Qwen2VLVideoProcessor(size={"shortest_edge": 3136, "longest_edge": 2**24})(frames, do_sample_frames=False)
    installed = "torchvision_here" not in str(torchvision.__file__)
    return [int(n) for n in made["video_grid_thw"][0]], installed and torchvision is sys.modules["torchvision"]


@pytest.mark.slow
def test_a_video_processor_works_here_in_a_process_that_inherits_the_environment_and_in_a_worker_of_ray():
    import ray  # noqa: PLC0415 - seconds, for this test alone

    from tests.builders.clusters import PLAIN, ray_here  # noqa: PLC0415

    assert process_video() == (SHAPE, True)
    done = run_python("-c", "from tests.test_torchvision import *; assert process_video() == (SHAPE, True)")
    assert done.returncode == 0, done.stderr
    with ray_here(*PLAIN):
        assert ray.get(ray.remote(process_video).remote()) == (SHAPE, True)


@pytest.mark.parametrize(
    ("registrations", "output"),
    [
        ("", "the whole of {folder}"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "a part of {folder}"),
        ("raise RuntimeError('another')", "RuntimeError: another"),
        (None, "No module named 'torchvision'"),
    ],
)
def test_registrations_are_left_out_only_where_they_fail_for_want_of_an_operator(tmp_path, registrations, output):
    folder = tmp_path / "torchvision"
    if registrations is not None:
        folder.mkdir()
        (folder / "_meta_registrations.py").write_text(registrations)
        code = "print('the whole' if _meta_registrations.__spec__ else 'a part', 'of', __path__[0])"
        (folder / "__init__.py").write_text(f"from torchvision import _meta_registrations\n{code}")
    environ = {"PYTHONPATH": f"{TORCHVISION}{os.pathsep}{tmp_path}"}
    done = run_python("-S", "-c", "import torchvision", env=environ)  # -S: without the installed packages
    assert output.format(folder=folder) in done.stdout + done.stderr
    assert (done.returncode == 0) == ("folder" in output)


USE = """
from gstep.backbones import ModelSource
from gstep.generic.processor import load_processor
import transformers.modeling_utils
try:
    load_processor(ModelSource.resolve("tiny"))
except Exception as error:
    print(error)
"""


def test_a_torchvision_for_cuda_beside_a_torch_without_stops_the_generic_family_alone(tmp_path):
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (folder / "version.py").write_text("__version__ = '9.9+cu999'\n")
    done = run_python("-c", USE, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 0, done.stderr
    assert re.match(r"torchvision does not fit torch .* \(9.9\+cu999\): install the build", done.stdout)
