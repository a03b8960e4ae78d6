"""Decoding on a GPU through PyAV: what it gives is what a core gives, and where it gives nothing a core serves."""

import av
import av.filter
import numpy as np
import pytest
import torch

from pipeline.video.decode import DecodeRequest
from pipeline.video.decoders import PyavDecoder, load_decoder
from pipeline.video.nvdec_decoder import _CODECS, NvdecDecoder, PyavNvdecDecoder
from pipeline.video.probe import probe
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.clips import KeepSize, sample, write_clip
from tests.gstep.synthetic import needs_cuda

# What FFmpeg's software gives, and in which layout a GPU gives the same numbers.
LAYOUTS = {"yuv420p": "nv12", "yuvj420p": "nv12", "yuv420p10le": "p010le"}


def without_gpu(index) -> PyavNvdecDecoder:
    """Make the decoder as it is but for the GPU: a core decodes, and frames come in a GPU's layout."""
    decoder = object.__new__(PyavNvdecDecoder)
    PyavDecoder.__init__(decoder, index)
    decoder._unpacker = av.video.reformatter.VideoReformatter()
    return decoder


@pytest.fixture(scope="module", params=["h264", "turned", "full range", "10 bits", "odd"])
def index(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    more = {
        "turned": {"rotation": 90},
        "full range": {"pix_fmt": "yuvj420p"},
        "10 bits": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
        "odd": {"size": (50, 66)},
    }
    named = request.param in more
    path = write_clip(folder / "a.mkv", **more[request.param]) if named else sample("bikes.mp4")
    made = probe(str(path), "matroska" if named else "mov")
    yield made
    made.packets.close()


def test_frames_in_a_gpu_s_layout_have_the_pixels_of_a_core(index):
    plain, ours = PyavDecoder(index), without_gpu(index)
    layout = LAYOUTS[index.pixel_format]
    for number, frame in enumerate(plain._iter_frames(np.arange(0, len(index.timestamps), 3))):
        packed = frame.reformat(format=layout)
        assert packed.format.name == layout
        assert np.array_equal(ours._pixels(packed), plain._pixels(frame)), number


def test_this_pyav_decodes_on_gpus():
    assert NvdecDecoder is PyavNvdecDecoder is load_decoder("nvdec")
    for codec in _CODECS:
        assert any(config.is_supported for config in av.Codec(codec, "r").hardware_configs), codec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_core_serves_and_the_row_says_why():
    request = DecodeRequest(sample("bikes.mp4"), Sampling(4), KeepSize(), decoder="nvdec")
    with DecodeSandbox(on_gpu=True) as sandbox:
        video = sandbox.decode(request)
    assert (
        video.record["backend"] == "pyav"
        and "PyAV finds no NVIDIA GPU with a video decoder here" in video.record["backend_note"]
    )


@needs_cuda
@pytest.mark.parametrize("codec", ["libx264", "libx265", "libvpx-vp9"])
def test_a_gpu_gives_the_frames_of_a_core(tmp_path, codec):
    path = write_clip(tmp_path / "a.mkv", codec=codec, size=(240, 320))
    with DecodeSandbox(timeout_s=120, on_gpu=True) as sandbox:
        there, here = (
            sandbox.decode(DecodeRequest(path, Sampling(8), KeepSize(), decoder=name)) for name in ("nvdec", "pyav")
        )
    assert there.record["backend"] == "nvdec", there.record["backend_note"]
    assert np.array_equal(there.frames, here.frames)
