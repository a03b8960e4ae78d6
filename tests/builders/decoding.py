"""Requests to decode a clip as it is, and the faults of such that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import VideoFault
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import KeepSize, shown

NEAR = 2  # mean difference of pixels: two neighbouring frames differ by 15 at least
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


def assert_as_shown(
    path: Path,
    samplings: Iterable[int | Sampling] = (1, 3, 8, Sampling(None, 7.0)),
    *,
    decode: Callable[..., DecodedVideo] = decode,
    exact_start: bool = True,
    size: tuple[int, int] | None = None,
    note: str = "",
) -> None:
    """All frames, and those of ``samplings``, are what ffmpeg shows, at ``size`` where it is not the first frame's."""
    truth, rates = shown(path, size), set()
    assert len(truth.frames) > 1
    for sampling in (len(truth.frames), *samplings):
        video = decode(path, sampling)
        assert video.record["source_frames"] == len(truth.frames)
        assert facts(video, "source_height", "source_width") == truth.frames.shape[1:3]
        late = video.timestamps - truth.timestamps[video.frame_indices]
        assert np.abs(late if exact_start else late - late[0]).max() < 1e-3
        expected = truth.frames[video.frame_indices].astype(np.int16)
        assert np.abs(video.frames - expected).mean(axis=(1, 2, 3)).max() < NEAR
        assert facts(video, "backend", "decode_warnings") == ("pyav", 0)
        said = video.record["backend_note"]
        assert said == note or (note and said.endswith(f"; {note}"))
        rates.add(video.record["fps"])
    assert len(rates) == 1
