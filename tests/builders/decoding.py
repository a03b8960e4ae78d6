"""Requests to decode a clip as it is, and the faults of such that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import VideoFault
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import KeepSize

NAMED = ("auto", "pyav", "decord", "torchcodec", "nvdec")


def request(
    path: Path | str, frames: int | Sampling = 8, *clip: float | None, decoder: str = "auto", **more: Any
) -> DecodeRequest:
    """Ask for frames of their own size; ``decoder`` may be a class of ``tests.builders.clips`` or a path to one."""
    name = decoder if decoder in NAMED or ":" in decoder else f"tests.builders.clips:{decoder}"
    sampling = Sampling(frames) if isinstance(frames, int) else frames
    return DecodeRequest(path, sampling, KeepSize(), *clip, decoder=name, **more)


def decode(path: Path | str, frames: int | Sampling = 8, *clip: float | None, **more: Any) -> DecodedVideo:
    return decode_video(request(path, frames, *clip, **more))


def fault_of(decoding: Callable[..., object], *arguments: Any, **options: Any) -> VideoFault:
    """Return the fault with which a decoding ends."""
    with pytest.raises(VideoFault) as caught:
        decoding(*arguments, **options)
    return caught.value


def facts(video: DecodedVideo, *names: str) -> tuple[Any, ...]:
    """Return values of a video's record."""
    return tuple(video.record[name] for name in names)
