"""Caches of a real clip to show, and what a page of one holds."""

from __future__ import annotations

import base64
import json
import re
import shutil
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
from rich.console import Console, RenderableType

from gstep.backbones.preprocess import FixedSizePreprocessor
from pipeline import TokenCache
from pipeline.errors import VideoFault
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.caches import encoded, encoded_failure, make_identity, random_tokens, write_header, write_shard
from tests.builders.clips import sample

FRAMES = 8
SIDE = 14
VIDEO = "bikes <script>alert('&')</script>\".mp4"
HOSTILE = "</script><script>x()</script> \u2028 {{ 7 * 7 }} {% if %} ]]> <!-- &amp; 'a' \"b\""
PREPROCESSOR = FixedSizePreprocessor((0.5,) * 3, (0.5,) * 3, height=384, width=384)


def decoded_clip(folder: Path) -> tuple[Path, DecodedVideo]:
    """Copy a real clip into ``folder``; return it and its sampled frames."""
    path = Path(shutil.copy(sample("bikes.mp4"), folder))
    return path, decode_video(DecodeRequest(path, Sampling(FRAMES), PREPROCESSOR))


def build(
    out: Path,
    decoded: tuple[Path, DecodedVideo],
    ratio: float = 0.25,
    method: str = "gstep",
    video_id: str = VIDEO,
    **more: Any,
) -> TokenCache:
    """Write a cache of the clip (with random tokens) and of a video that failed; ``more`` overrides columns."""
    path, video = decoded
    sampling = more.pop("sampling", {"num_frames": FRAMES})
    store = write_header(out, identity=make_identity(ratio, sampling=sampling))
    columns = {**make_decoding_columns(video, 1), "uri": str(path), **more}
    tokens = random_tokens(0, (FRAMES, columns.get("tokens_per_frame", SIDE * SIDE), 16))
    fault = VideoFault("corrupt", "the file is cut off")
    write_shard(store, "run", encoded(video_id, tokens, ratio, method, **columns), encoded_failure("bad.mp4", fault))
    return TokenCache(out)


def data_of(html: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(data)


def pictures_of(html: str) -> list[np.ndarray]:
    return [image(base64.b64decode(data)) for data in re.findall(r"data:image/jpeg;base64,([^\"]+)", html)]


def links_of(html: str) -> list[str]:
    """Return what a page refers to."""
    found = re.findall(r"(?:src|href|action|poster)\s*=\s*[\"']?([^\"'\s>]+)|url\(([^)]*)\)|@import", html)
    return [link for link, _ in found]


class Texts(HTMLParser):
    """The texts of a page as a browser has them, and how many scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.scripts = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def cells(path: str) -> set[tuple[int, int]]:
    """Return the (y, x) of the cells of a path of runs."""
    runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path)
    return {(int(y), int(x) + i) for x, y, n in runs for i in range(int(n))}


def places_of(mask: np.ndarray) -> set[tuple[int, int]]:
    """Return the (y, x) where a mask is true."""
    return set(zip(*np.nonzero(mask), strict=True))


def middles_of(pixels: np.ndarray) -> np.ndarray:
    """Return the [SIDE,SIDE,3] pixels in the middles of a tile's cells."""
    rows, columns = ((np.arange(SIDE) + 0.5) / SIDE * size for size in pixels.shape[:2])
    return pixels[rows.astype(int)][:, columns.astype(int)]


def shown(report: RenderableType) -> str:
    """Return what a terminal shows of a report."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report)
    return captured.get()


def image(data: bytes) -> np.ndarray:
    """Read [H,W,3] of a JPEG or PNG file."""
    with av.open(BytesIO(data)) as file:
        return next(file.decode(video=0)).to_ndarray(format="rgb24")
