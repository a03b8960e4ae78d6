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
from pipeline.options import make_config
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_stage import VideoEncoder, make_pruning_columns, to_sampled_video
from pipeline.prune.recipe import resolve
from pipeline.rows import VideoRecord, todo_row
from pipeline.storage.s3 import is_s3
from pipeline.video.sandbox import InThisProcess

#: The options of ``python -m jobs.prune`` that concern one video.
OPTIONS = frozenset(
    {"model", "revision", "family", "siglip", "device", "dtype", "attn", "retention_ratio", "pruner", "pruner_param"}
    | {"seed", "num_frames", "frame_rule", "fps", "max_frames", "snap_to_keyframes", "min_pixels", "max_pixels"}
    | {"max_video_tokens", "decoder", "fetch_memory", "s3_endpoint", "s3_requester_pays"}
)
_DIM_FACTOR = 3  # divides the brightness of pruned tokens in a picture


@dataclass(frozen=True)
class EncodedVideo:
    """An encoded and pruned video: T frames (on Qwen pairs of frames) of N tokens, B kept tokens.

    Attributes:
        pruned: the kept tokens [B,D] bfloat16 with ``index``, ``rank`` and so on; ``pruned.at(0.10)`` is a smaller
            selection.
        frames: [F,h,w,3] uint8, as the encoder gets them: F = T; on Qwen 2 T, or 2 T - 1 if a pair repeats a frame.
        timestamps: [F] seconds at which each frame is shown.
        frame_indices: [F] indices in the source.
        grid: (rows, columns) of the N tokens of a frame; None if the model does not say, as of the family generic.
        record: its row of the videos table in a cache; its ``fps`` is the rate of the source.
    """

    pruned: PrunedTokens
    frames: NDArray[np.uint8]
    timestamps: list[float]
    frame_indices: list[int]
    grid: tuple[int, int] | None
    record: VideoRecord

    def kept(self, retention_ratio: float | None = None) -> NDArray[np.bool_]:
        """Return a mask [T,rows,columns] of the kept tokens, or of the smaller selection at ``retention_ratio``.

        It is [T,N] without a ``grid``. Raises as ``pruned.at``.
        """
        pruned = self.pruned if retention_ratio is None else self.pruned.at(retention_ratio)
        mask = np.zeros(pruned.n_total, np.bool_)
        mask[pruned.index.cpu().numpy()] = True
        return mask.reshape(-1, *(self.grid or (self.record["tokens_per_frame"],)))

    def picture(self, retention_ratio: float | None = None, columns: int = 4) -> NDArray[np.uint8]:
        """Draw [H,W,3] uint8: the (first) frame of each t side by side, dark where its tokens were pruned.

        ``columns`` frames share a row of the picture. ``retention_ratio`` is as in ``kept``. Raises ValueError if the
        grid of a frame's tokens is not known.
        """
        if self.grid is None:
            raise ValueError("this model does not say where in a frame its tokens are: use kept(), a mask [T,N]")
        mask = self.kept(retention_ratio)
        frames = self.frames[:: math.ceil(len(self.frames) / len(mask))]
        _, height, width, _ = frames.shape
        rows, lines = (np.arange(n) * of // n for n, of in zip((height, width), self.grid, strict=True))
        lit = mask[:, rows][:, :, lines, None]
        tiles = np.where(lit, frames, frames // _DIM_FACTOR)
        blank = np.zeros((-len(tiles) % columns, *tiles.shape[1:]), np.uint8)
        mosaic = np.concatenate([tiles, blank]).reshape(-1, columns, height, width, 3)
        return mosaic.swapaxes(1, 2).reshape(-1, columns * width, 3)


class LocalEncoder:
    """An encoder of one video after another in this process; the model is loaded once.

    >>> encoder = pipeline.LocalEncoder(model="tiny", num_frames=8, retention_ratio=0.25)
    >>> video = encoder("bikes.mp4", end_s=4)

    ``options`` are the options of ``python -m jobs.prune`` that concern one video (OPTIONS), with the same defaults.

    Raises UsageError if an option makes no sense or the model is missing.
    """

    def __init__(self, **options: Any) -> None:
        """Check the options and load the model; decoding runs in this process. Raises UsageError and ModelError."""
        config = make_config(PruneConfig, "encode_video", options, OPTIONS)
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
        record, frames = self._decode(os.fspath(path), start_s, end_s)
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

    def _decode(self, path: str, start_s: float | None, end_s: float | None) -> tuple[VideoRecord, NDArray[np.uint8]]:
        """Decode a video or clip: return its record and frames [F,h,w,3]. Raises VideoFault."""
        place = path if is_s3(path) else os.path.abspath(path)  # noqa: PTH100 - links stay
        row = todo_row(path, place, start_s, end_s)
        with self._decoder.open_archives([row]) as archives, self._decoder.open(row, archives) as source:
            record, frames = self._decoder.decode_one(row, source)
        if frames is None:
            raise VideoFault(record["error_class"], record["error_message"], stage=record["error_stage"])
        return record, frames


def encode_video(
    path: str | os.PathLike[str], *, start_s: float | None = None, end_s: float | None = None, **options: Any
) -> EncodedVideo:
    """Decode one video, encode it and prune its tokens in this process: no Ray, no cache, nothing is written.

    >>> video = pipeline.encode_video("bikes.mp4", model="tiny", num_frames=8, retention_ratio=0.25)
    >>> video.pruned.tokens, video.pruned.index, video.timestamps  # [B,D], [B], seconds
    >>> matplotlib.pyplot.imshow(video.picture())  # pruned areas are dark

    ``prune_videos`` would cache the same tokens. The model is loaded for this call: for several videos make
    a :class:`pipeline.LocalEncoder` with the same options. The file is decoded in this process, so a file that crashes
    the decoder ends it; ``prune_videos`` decodes in child processes.

    Args:
        path: a local file or s3://bucket/key.
        start_s, end_s: the clip, in seconds.
        options: the options of ``python -m jobs.prune --help-all`` that concern one video: ``model``,
            ``retention_ratio``, ``pruner``, ``num_frames``, ``fps``, ``device`` and so on.

    Raises UsageError if an option makes no sense, VideoFault (with ``fault_class``) if the video cannot be read.
    """
    return LocalEncoder(**options)(path, start_s=start_s, end_s=end_s)
