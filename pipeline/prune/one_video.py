"""``pipeline.encode_video``: one video through the stages of a run in this process, without Ray or a cache."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gstep import PrunedTokens, make_pruner
from pipeline.errors import VideoFault, usage_errors
from pipeline.options import config_of
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_stage import VideoEncoder, pruned_columns, without_pixels
from pipeline.prune.recipe import resolve
from pipeline.rows import VideoRecord, todo_row
from pipeline.storage.s3 import is_object
from pipeline.video.sandbox import InThisProcess

#: Those of ``python -m jobs.prune`` that decide what becomes of one video.
OPTIONS = frozenset(
    {"model", "revision", "siglip", "device", "dtype", "attn", "retention_ratio", "pruner", "pruner_param", "seed"}
    | {"num_frames", "frame_rule", "fps", "max_frames", "snap_to_keyframes", "min_pixels", "max_pixels"}
    | {"max_video_tokens", "decoder", "fetch_memory", "s3_endpoint"}
)
_DIMMED = 3  # divides the brightness of pruned tokens in a picture


@dataclass(frozen=True)
class EncodedVideo:
    """A video that was encoded and pruned: T frames (on Qwen pairs of frames) of N tokens, B of them kept.

    Attributes:
        pruned: the kept tokens [B,D] bfloat16 with ``index``, ``rank`` and so on; ``pruned.at(0.10)`` is a smaller
            selection.
        frames: [F,h,w,3] uint8, as the encoder saw them: F = T; on Qwen 2 T, or one less where a pair repeats one.
        timestamps: [F] seconds, when each is shown.
        frame_indices: [F] places in the source.
        grid: (rows, columns) in which the N tokens of a frame lie.
        record: its row of the videos table, as a cache would hold it.
    """

    pruned: PrunedTokens
    frames: NDArray[np.uint8]
    timestamps: list[float]
    frame_indices: list[int]
    grid: tuple[int, int]
    record: VideoRecord

    def kept(self, retention_ratio: float | None = None) -> NDArray[np.bool_]:
        """Return a mask [T,rows,columns] of the kept tokens, or of the smaller selection. Raise as ``pruned.at``."""
        pruned = self.pruned if retention_ratio is None else self.pruned.at(retention_ratio)
        kept = np.zeros(pruned.n_total, np.bool_)
        kept[pruned.index.cpu().numpy()] = True
        return kept.reshape(-1, *self.grid)

    def picture(self, retention_ratio: float | None = None, columns: int = 4) -> NDArray[np.uint8]:
        """Draw [H,W,3] uint8: the (first) frame of each t side by side, dark where its tokens were pruned."""
        kept = self.kept(retention_ratio)
        frames = self.frames[:: math.ceil(len(self.frames) / len(kept))]
        _, height, width, _ = frames.shape
        rows, lines = (np.arange(n) * of // n for n, of in zip((height, width), self.grid, strict=True))
        lit = kept[:, rows][:, :, lines, None]
        tiles = np.where(lit, frames, frames // _DIMMED)
        blank = np.zeros((-len(tiles) % columns, *tiles.shape[1:]), np.uint8)
        mosaic = np.concatenate([tiles, blank]).reshape(-1, columns, height, width, 3)
        return mosaic.swapaxes(1, 2).reshape(-1, columns * width, 3)


class LocalEncoder:
    """An encoder of one video after another in this process; the model is loaded once.

    >>> encoder = pipeline.LocalEncoder(model="tiny", num_frames=8, retention_ratio=0.25)
    >>> video = encoder("bikes.mp4", end_s=4)

    ``options`` are those of ``python -m jobs.prune`` that concern one video (OPTIONS), with the same defaults.

    Raises UsageError where they make no sense or the model is not there.
    """

    def __init__(self, **options: Any) -> None:
        config = config_of(PruneConfig, "encode_video", options, OPTIONS)
        recipe = resolve(config)
        self._setup = recipe.encode_setup(config.device, config.dtype)
        with usage_errors():
            self._pruner = make_pruner(self._setup.pruner, **self._setup.pruner_params)
            self._encoder = VideoEncoder(self._setup)
        self._decoder = VideoDecoder(recipe.decode_setup(), InThisProcess())

    def __call__(
        self, path: str | os.PathLike[str], *, start_s: float | None = None, end_s: float | None = None
    ) -> EncodedVideo:
        """Encode a video, or the clip of it from ``start_s`` to ``end_s``; see :func:`encode_video`."""
        record, frames = self._decoded(os.fspath(path), start_s, end_s)
        visual = self._encoder.encoded(frames)
        pruned = self._pruner.prune(visual, self._setup.retention_ratio, seed=self._setup.seed)
        extra = self._encoder.backbone.model_extra(without_pixels(record))
        rows, columns = extra["grid"]
        return EncodedVideo(
            pruned=pruned,
            frames=frames,
            timestamps=record["timestamps"],
            frame_indices=record["frame_indices"],
            grid=(rows, columns),
            record={**record, **pruned_columns(pruned, visual)},
        )

    def _decoded(self, path: str, start_s: float | None, end_s: float | None) -> tuple[VideoRecord, NDArray[np.uint8]]:
        """Decode a video or clip. Raises VideoFault."""
        place = path if is_object(path) else os.path.abspath(path)  # noqa: PTH100 - links stay
        row = todo_row(path, place, start_s, end_s)
        with self._decoder.open(row) as source:
            record, frames = self._decoder.decode_one(row, source)
        if frames is None:
            raise VideoFault(record["error_class"], record["error_message"], stage=record["error_stage"])
        return record, frames


def encode_video(
    path: str | os.PathLike[str], *, start_s: float | None = None, end_s: float | None = None, **options: Any
) -> EncodedVideo:
    """Decode one video, encode it and prune its tokens, here and now: no Ray, no cache, nothing is written.

    >>> video = pipeline.encode_video("bikes.mp4", model="tiny", num_frames=8, retention_ratio=0.25)
    >>> video.pruned.tokens, video.pruned.index, video.timestamps  # [B,D], [B], seconds
    >>> matplotlib.pyplot.imshow(video.picture())  # what was kept of each frame

    The tokens are those that ``prune_videos`` would cache. The model is loaded for this call: for several videos make
    one :class:`pipeline.LocalEncoder` of the same options. The file is decoded in this process, so one that crashes a
    decoder takes it along; ``prune_videos`` decodes in processes that may die.

    Args:
        path: a local file or s3://bucket/key.
        start_s, end_s: the clip, in seconds.
        options: those of ``python -m jobs.prune --help-all`` that concern one video: ``model``, ``retention_ratio``,
            ``pruner``, ``num_frames``, ``fps``, ``device`` and so on.

    Raises UsageError where the options make no sense, VideoFault (with ``fault_class``) where the video cannot be read.
    """
    return LocalEncoder(**options)(path, start_s=start_s, end_s=end_s)
