"""``pipeline.encode_video`` and ``LocalEncoder``: encode and prune videos in this process, without Ray or a cache."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gstep import PrunedTokens, make_pruner
from pipeline.errors import VideoFault, convert_usage_errors
from pipeline.options import make_config
from pipeline.prune.config import VIDEO_OPTIONS, PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_stage import VideoEncoder, make_pruning_columns, to_sampled_video
from pipeline.prune.recipe import resolve_recipe
from pipeline.rows import VideoRecord, make_todo_row
from pipeline.storage.s3 import is_s3
from pipeline.video.sandbox import InThisProcess

_DIM_FACTOR = 3  # divides the brightness of pruned tokens in a picture


@dataclass(frozen=True)
class EncodedVideo:
    """An encoded and pruned video of T frames (pairs of frames on Qwen) with N tokens each, of which B are kept.

    Attributes:
        pruned: the kept tokens [B,D] in bfloat16, with ``index``, ``rank`` and so on. ``pruned.at(0.10)`` is a smaller
            selection.
        frames: [F,h,w,3] uint8, resized for the encoder. F = T; on Qwen F = 2 T, or 2 T - 1 if a pair repeats a frame.
        timestamps: [F] seconds at which each frame is shown.
        frame_indices: [F] indices of the frames in the source.
        grid: (rows, columns) of the N tokens of a frame; None if the model does not define it, as in the generic
            family.
        record: the columns of the videos table on decoding and tokens; ``fps`` in it is the rate of the source.
    """

    pruned: PrunedTokens
    frames: NDArray[np.uint8]
    timestamps: list[float]
    frame_indices: list[int]
    grid: tuple[int, int] | None
    record: VideoRecord

    def kept(self, retention_ratio: float | None = None) -> NDArray[np.bool_]:
        """Return a boolean mask of the kept tokens, [T,rows,columns], or [T,N] without a ``grid``.

        Args:
            retention_ratio: of a smaller selection; None for all kept tokens.

        Raises:
            ValueError: the ratio is larger than the stored ratio, or differs from it and the method is not nested.
        """
        pruned = self.pruned if retention_ratio is None else self.pruned.at(retention_ratio)
        mask = np.zeros(pruned.n_total, np.bool_)
        mask[pruned.index.cpu().numpy()] = True
        return mask.reshape(-1, *(self.grid or (self.record["tokens_per_frame"],)))

    def picture(self, retention_ratio: float | None = None, columns: int = 4) -> NDArray[np.uint8]:
        """Draw the frames side by side, [H,W,3] uint8, with the areas of pruned tokens dimmed.

        On Qwen, the first frame of each pair is drawn. The rest of the last row is white.

        Args:
            retention_ratio: of a smaller selection; None for all kept tokens.
            columns: frames in each row of the picture.

        Raises:
            ValueError: ``grid`` is None, or the ratio is not available.
        """
        if self.grid is None:
            raise ValueError("this model does not say where in a frame its tokens are: use kept(), a mask [T,N]")
        mask = self.kept(retention_ratio)
        frames = self.frames[:: math.ceil(len(self.frames) / len(mask))]
        _, height, width, _ = frames.shape
        rows, lines = (np.arange(n) * of // n for n, of in zip((height, width), self.grid, strict=True))
        lit = mask[:, rows][:, :, lines, None]
        tiles = np.where(lit, frames, frames // _DIM_FACTOR)
        blank = np.full(
            (-len(tiles) % columns, *tiles.shape[1:]), 255, np.uint8
        )  # white, since a dark frame would look pruned
        mosaic = np.concatenate([tiles, blank]).reshape(-1, columns, height, width, 3)
        return mosaic.swapaxes(1, 2).reshape(-1, columns * width, 3)


class LocalEncoder:
    """An encoder of videos in this process, which loads the model once.

    >>> encoder = pipeline.LocalEncoder(model="tiny", num_frames=8, retention_ratio=0.25)
    >>> video = encoder("bikes.mp4", end_s=4)

    Args:
        options: the options of ``python -m jobs.prune`` that concern one video (VIDEO_OPTIONS), with the same defaults.
    """

    def __init__(self, **options: Any) -> None:
        """Check the options, load the vision tower, and prepare decoding in this process.

        UsageError is raised if an option is unknown or invalid, or the model or method cannot be used.
        """
        config = make_config(PruneConfig, "encode_video", options, VIDEO_OPTIONS)
        recipe = resolve_recipe(config)
        self._setup = recipe.make_encode_setup(config.device, config.dtype)
        with convert_usage_errors():
            self._pruner = make_pruner(self._setup.pruner, **self._setup.pruner_params)
            self._encoder = VideoEncoder(self._setup)
        self._decoder = VideoDecoder(recipe.make_decode_setup(), InThisProcess())

    def __call__(
        self, path: str | os.PathLike[str], *, start_s: float | None = None, end_s: float | None = None
    ) -> EncodedVideo:
        """Encode and prune a video, or its clip from ``start_s`` to ``end_s`` seconds.

        A file that crashes the decoder ends this process. Errors of the pruning method and of the encoder pass
        unchanged.

        Args:
            path: a local file or s3://bucket/key, which is fetched into memory.

        Raises:
            VideoFault: the video cannot be read, or the model does not take it.
        """
        record, frames = decode_file(self._decoder, os.fspath(path), start_s, end_s)
        video = to_sampled_video(record)
        visual = self._encoder.encode_frames(frames, video)
        pruned = self._pruner.prune(visual, self._setup.retention_ratio, seed=self._setup.seed)
        grid = self._encoder.backbone.model_extra(video).get("grid")
        return EncodedVideo(
            pruned=pruned,
            frames=frames,
            timestamps=record["timestamps"],
            frame_indices=record["frame_indices"],
            grid=None if grid is None else (grid[0], grid[1]),
            record={**record, **make_pruning_columns(pruned, visual)},
        )


def decode_file(
    decoder: VideoDecoder, path: str, start_s: float | None = None, end_s: float | None = None
) -> tuple[VideoRecord, NDArray[np.uint8]]:
    """Decode a video or clip, and return its record and its resized frames [F,h,w,3].

    Args:
        path: a local file or s3://bucket/key, which is fetched into memory; it becomes the video's id.

    Raises:
        VideoFault: the video cannot be read or decoded.
    """
    uri = path if is_s3(path) else os.path.abspath(path)  # noqa: PTH100 - links stay
    row = make_todo_row(path, uri, start_s, end_s)
    with decoder.open_archives([row]) as archives, decoder.open(row, archives) as source:
        record, frames = decoder.decode_row(row, source)
    if frames is None:
        raise VideoFault(record["error_class"], record["error_message"], stage=record["error_stage"])
    return record, frames


def encode_video(
    path: str | os.PathLike[str], *, start_s: float | None = None, end_s: float | None = None, **options: Any
) -> EncodedVideo:
    """Decode one video, encode it and prune its tokens in this process, without Ray or a cache.

    >>> video = pipeline.encode_video("bikes.mp4", model="tiny", num_frames=8, retention_ratio=0.25)
    >>> video.pruned.tokens, video.pruned.index, video.timestamps  # [B,D], [B], seconds
    >>> matplotlib.pyplot.imshow(video.picture())  # pruned areas are dark

    Each call loads the model: for several videos, create a :class:`pipeline.LocalEncoder` with the same options. A file
    that crashes the decoder ends this process; ``prune_videos`` decodes in child processes. Errors of the pruning
    method and of the encoder pass unchanged.

    Args:
        path: a local file or s3://bucket/key.
        start_s, end_s: the clip in seconds; None for the start or end of the video.
        options: the options of ``python -m jobs.prune --help-all`` that concern one video: ``model``,
            ``retention_ratio``, ``pruner``, ``num_frames``, ``fps``, ``device`` and so on.

    Raises:
        UsageError: an option is unknown or invalid, or the model or method cannot be used.
        VideoFault: the video cannot be read or encoded; ``fault_class`` says why.
    """
    return LocalEncoder(**options)(path, start_s=start_s, end_s=end_s)
