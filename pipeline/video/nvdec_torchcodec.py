"""The video decoder of an NVIDIA GPU, through torchcodec, where PyAV has none. Not measured: no GPU has run this yet.

The frames come back to the host, where they are resized as any decoder's frames: the GPU decodes and converts the
colours, with other last bits than FFmpeg. So whatever else holds for a decode child holds for this one, except that its
memory is limited by what it writes to, since a CUDA context reserves hundreds of GiB of addresses.
"""

from __future__ import annotations

import torch

from pipeline.video.torchcodec_decoder import TorchcodecDecoder  # first, since its error names a remedy

import torchcodec  # isort: skip

if torchcodec.__version__.endswith("+cpu") or torch.version.cuda is None:
    raise ImportError(
        f"torchcodec {torchcodec.__version__} with torch {torch.__version__} decodes on CPUs only; install both for "
        "CUDA: pip install torch torchcodec --index-url https://download.pytorch.org/whl/cu130"
    )


class TorchcodecNvdecDecoder(TorchcodecDecoder):
    """The decoder with torchcodec on the first GPU this process sees. Raises RuntimeError without a GPU."""

    device = "cuda"
