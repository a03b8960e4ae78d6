"""The decoder on an NVIDIA GPU (NVDEC): with PyAV's own wheel, or with torchcodec if PyAV was built without CUDA.

PyAV's frames are unpacked on the host to the pixel layout of FFmpeg's software decoders. All later steps are those of
PyAV on a CPU, color conversion included.
"""

from __future__ import annotations

from functools import cache

import av
from av.codec.hwaccel import HWAccel, hwdevices_available
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import VideoReformatter

from pipeline.video.decoders import FrameDecoder, Frames, PyavDecoder
from pipeline.video.probe import IndexMismatch, VideoIndex

# Codecs of NVDEC. For others, the decoder would need facts from the container that a decoder made here does not get.
_CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg2video")
# Decoded frames that may wait on the GPU besides reference frames: as many as a flush returns.
_MAX_GPU_FRAMES = 16
_NO_GPU = "PyAV finds no NVIDIA GPU with a video decoder here (libcuda and libnvcuvid): look at nvidia-smi"


class PyavNvdecDecoder(PyavDecoder):
    """The decoder with PyAV on the first GPU that this process sees.

    ``read`` also raises PyAV's errors for data that the GPU cannot decode.
    """

    def __init__(self, index: VideoIndex) -> None:
        """Create a decoder on the GPU, whose primary context then stays alive until the process ends.

        Raises:
            IndexMismatch: the codec is decoded on the CPU only.
            RuntimeError: there is no GPU, or it has no decoder for the codec.
        """
        super().__init__(index)
        if self._packets.codec not in _CODECS:
            raise IndexMismatch(f"{self._packets.codec} is decoded on the CPU")
        self._unpacker = VideoReformatter()
        _hold_primary_context()
        self._codec = _make_gpu_decoder(self._packets.codec)
        software = self._packets.stream.codec_context
        self._codec.extradata = software.extradata
        self._codec.width, self._codec.height = software.width, software.height

    def _pixels(self, frame: av.VideoFrame) -> Frames:
        """Copy a frame from the GPU to the host and convert it to [H,W,3] uint8 RGB.

        Raises:
            IndexMismatch: the frame is interlaced or has another size than the index.
            VideoFault: "unsupported" for a color matrix that FFmpeg does not convert.
        """
        index = self._index
        if frame.interlaced_frame:
            raise IndexMismatch("interlaced frames are decoded on the CPU")
        size = (index.height, index.width) if index.orientation.transpose else (index.width, index.height)
        if (frame.width, frame.height) != size:  # a GPU crops hidden edges only on the right and at the bottom
            raise IndexMismatch(
                f"the GPU delivers frames of {frame.width}x{frame.height}, the CPU of {size[0]}x{size[1]}"
            )
        # FFmpeg scales the chroma of the GPU's layouts (nv12, p010) differently from planar chroma.
        return super()._pixels(self._unpacker.reformat(frame, format=index.pixel_format, threads=1))


def _make_gpu_decoder(codec: str) -> VideoCodecContext:
    """Create a decoder on the GPU whose frames stay there.

    Raises:
        RuntimeError: there is no GPU, or PyAV has no GPU decoder for ``codec``.
    """
    accelerator = HWAccel("cuda", allow_software_fallback=False, options={"primary_ctx": "1"}, is_hw_owned=True)
    try:
        context = av.CodecContext.create(codec, "r", accelerator)
    except (OSError, av.error.FFmpegError) as error:
        raise RuntimeError(f"{_NO_GPU} ({error})") from error
    if not isinstance(context, VideoCodecContext) or not context.is_hwaccel:
        raise RuntimeError(f"PyAV {av.__version__} has no GPU decoder of {codec}")
    context.thread_count = 1
    context.options = {"extra_hw_frames": str(_MAX_GPU_FRAMES)}
    return context


@cache
def _hold_primary_context() -> VideoCodecContext:
    """Hold the GPU's primary context until this process ends."""
    return _make_gpu_decoder("h264")


def make_torchcodec_decoder() -> type[FrameDecoder]:
    """Return the decoder class with torchcodec on the first GPU; it has not run on a GPU yet.

    The GPU decodes and converts colors, with other last bits than FFmpeg.

    Raises:
        ImportError: torchcodec is missing, or it or torch is built for CPUs only; the message gives the remedy.
    """
    from pipeline.video.torchcodec_decoder import TorchcodecDecoder  # noqa: I001, PLC0415 - its error names a remedy
    import torch  # noqa: PLC0415
    import torchcodec  # noqa: PLC0415

    if torchcodec.__version__.endswith("+cpu") or torch.version.cuda is None:
        raise ImportError(
            f"torchcodec {torchcodec.__version__} with torch {torch.__version__} decodes on CPUs only; install both "
            "for CUDA: pip install torch torchcodec --index-url https://download.pytorch.org/whl/cu130"
        )

    class TorchcodecNvdecDecoder(TorchcodecDecoder):
        """The decoder with torchcodec on the first GPU that this process sees; RuntimeError without a GPU."""

        device = "cuda"

    return TorchcodecNvdecDecoder


#: With PyAV, or with torchcodec if this PyAV was built without CUDA; ImportError if neither is possible.
NvdecDecoder: type[FrameDecoder] = PyavNvdecDecoder if "cuda" in hwdevices_available() else make_torchcodec_decoder()
