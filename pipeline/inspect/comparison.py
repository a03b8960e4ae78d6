"""``Comparison``, the result of ``pipeline.compare``."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from pipeline.cache.header import ModelIdentity, SamplingIdentity
from pipeline.console import clean_line
from pipeline.inspect.page import write_html
from pipeline.inspect.thumbnails import Pictures
from pipeline.rows import Json, JsonObject, VideoRow

_MAX_INLINE = 860  # pixels of the page's height in a notebook; the rest scrolls


@dataclass(frozen=True, eq=False)
class MethodSelection:
    """The tokens that a method keeps of a video, T frames (on Qwen pairs of frames) x N tokens, at one ratio.

    Attributes:
        method: the method with its parameters: ``random,seed=1``.
        index: [B] int64 on the CPU, flat index t*N + i, ascending. A merged token has the index of its target.
        merged: [B] bool, True for a token that is a mixture of several; None for a method that never merges.
        n_total: T*N, the number of tokens before pruning.
        tokens_per_frame: N.
        settings: all parameters of the method, and the seed of a method that draws.
    """

    method: str
    retention_ratio: float
    index: Tensor
    merged: Tensor | None
    n_total: int
    tokens_per_frame: int
    settings: Mapping[str, Json] = field(default_factory=dict)

    @property
    def ratio_label(self) -> str:
        """The nominal ratio in percent, as in ``25 %``."""
        return f"{100 * self.retention_ratio:.6g} %"

    @property
    def kept_ratio(self) -> float:
        """The actual share of kept tokens, B / (T*N)."""
        return len(self.index) / self.n_total

    @property
    def n_merged(self) -> int:
        """The number of kept tokens that are mixtures."""
        return 0 if self.merged is None else int(self.merged.sum())

    @cached_property
    def kept_per_frame(self) -> list[int]:
        """The number of kept tokens in each of the T frames."""
        n_frames = self.n_total // self.tokens_per_frame
        counts: list[int] = torch.bincount(self.index // self.tokens_per_frame, minlength=n_frames).tolist()
        return counts

    @property
    def per_frame_label(self) -> str:
        """The smallest and the largest number of kept tokens per frame, ``4 to 160``, or just ``49``."""
        return " to ".join(map(str, sorted({min(self.kept_per_frame), max(self.kept_per_frame)})))

    def mask(self, *, merged: bool = False) -> NDArray[np.bool_]:
        """Return a bool mask [T,N] of the kept tokens.

        Args:
            merged: True for the merged tokens alone; all False for a method that never merges.
        """
        index = self.index
        if merged:
            index = index[:0] if self.merged is None else index[self.merged]
        mask = np.zeros(self.n_total, np.bool_)
        mask[index.numpy()] = True
        return mask.reshape(-1, self.tokens_per_frame)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The tokens that several methods keep of one video. A notebook displays its page.

    >>> comparison.selections["vidcom2", 0.25].index
    >>> comparison.save("page.html")

    Attributes:
        selections: the kept tokens by (method, retention ratio): the largest ratio first, then in the order of the
            methods.
        metadata: the video's row of the videos table (see pipeline.cache.schema) with decoded JSON columns; for a video
            that is in no cache, the columns that decoding fills.
        grid: (rows, columns) of the N tokens of a frame; None if the model does not say.
        origin: a sentence on where the selections come from; "" for a video encoded from its file.
        pictures: JPEGs of the sampled frames, or the reason why there are none.
    """

    video_id: str
    selections: Mapping[tuple[str, float], MethodSelection]
    metadata: VideoRow
    grid: tuple[int, int] | None
    model: ModelIdentity
    sampling: SamplingIdentity
    origin: str
    pictures: Pictures

    @property
    def rows(self) -> Sequence[MethodSelection]:
        """The selections, in order."""
        return list(self.selections.values())

    @property
    def retention_ratios(self) -> list[float]:
        """The distinct nominal ratios, the largest first."""
        return list(dict.fromkeys(ratio for _, ratio in self.selections))

    def at(self, retention_ratio: float) -> Sequence[MethodSelection]:
        """Return the selections at exactly this nominal ratio, in the order of the methods."""
        return [selection for selection in self.rows if selection.retention_ratio == retention_ratio]

    def overlap(self, retention_ratio: float) -> NDArray[np.float64]:
        """Compute the share of its kept tokens that each method has in common with each other method at a ratio.

        Returns:
            [K,K] for the K selections of ``at(retention_ratio)``: row a, column b is the share of the tokens kept by a
            that b keeps too.

        Raises:
            ValueError: there is no selection at this ratio.
        """
        masks = np.stack([selection.mask().ravel() for selection in self.at(retention_ratio)]).astype(np.float64)
        shares: NDArray[np.float64] = masks @ masks.T / masks.sum(axis=1, keepdims=True)
        return shares

    def to_html(self) -> str:
        """Return the page as HTML: a row of frames for each method and ratio. It loads no other file."""
        from pipeline.inspect.comparison_page import draw_comparison  # noqa: PLC0415 - it draws this class

        return draw_comparison(self)

    def save(self, file: str | os.PathLike[str]) -> str:
        """Write the page to ``file``, replacing an existing file; return a line about it for the terminal.

        Raises:
            UsageError: the file cannot be written.
        """
        return write_html(Path(file), self.to_html(), self.video_id, self.pictures.missing)

    def _repr_html_(self) -> str:
        """Return the page in an iframe, which separates its styles from the notebook's."""
        style = f"width:100%;height:{_MAX_INLINE}px;border:0;border-radius:8px"
        title = html.escape(f"{self.video_id}: kept tokens")
        return f'<iframe title="{title}" srcdoc="{html.escape(self.to_html())}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        names = ", ".join(f"{method} at {selection.ratio_label}" for (method, _), selection in self.selections.items())
        return f"Comparison({self.video_id!r}: {names})"

    def report(self) -> RenderableType:
        """Render a table of the selections, and for each ratio with several selections a table of overlaps."""
        table = Table(show_edge=False)
        for name in ("method", "ratio", "tokens", "kept", "merged", "a frame"):
            table.add_column(name, justify="left" if name == "method" else "right")
        for row in self.rows:
            tokens, share = f"{len(row.index):,} of {row.n_total:,}", f"{row.kept_ratio:.1%}"
            merged = "" if row.merged is None else f"{row.n_merged:,}"
            table.add_row(Text(row.method), row.ratio_label, tokens, share, merged, row.per_frame_label)
        parts: list[RenderableType] = [Text(clean_line(self.video_id)), *([Text(self.origin)] if self.origin else [])]
        parts += ["", table]
        for ratio in self.retention_ratios:
            if len(rows := self.at(ratio)) > 1:
                common = Table(title=f"in common at {rows[0].ratio_label}", title_justify="left", show_edge=False)
                for name in ("of the tokens of", *(row.method for row in rows)):
                    common.add_column(Text(name), justify="right")
                for row, shares in zip(rows, self.overlap(ratio), strict=True):
                    common.add_row(Text(row.method), *(f"{share:.1%}" for share in shares))
                parts += ["", common]
        return Group(*parts)

    def as_record(self) -> JsonObject:
        """Return the counts of each selection and the overlaps as a JSON-able dict, without the indices."""
        selections = [
            {
                "method": row.method,
                "retention_ratio": row.retention_ratio,
                "settings": row.settings,
                "n_kept": len(row.index),
                "kept_ratio": row.kept_ratio,
                "n_merged": None if row.merged is None else row.n_merged,
                "kept_per_frame": row.kept_per_frame,
            }
            for row in self.rows
        ]
        in_common = [
            {
                "retention_ratio": ratio,
                "methods": [row.method for row in self.at(ratio)],
                "shares": self.overlap(ratio).tolist(),
            }
            for ratio in self.retention_ratios
        ]
        record = {
            "video_id": self.video_id,
            "origin": self.origin,
            "n_total": self.rows[0].n_total,
            "grid": None if self.grid is None else list(self.grid),
            "selections": selections,
            "in_common": in_common,
        }
        return cast(JsonObject, record)
