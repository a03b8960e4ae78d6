"""How many tokens each method kept of every frame, of the videos on which methods disagree most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.evaluate.report.text import title_of
from pipeline.evaluate.statistics.errors import Floats
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm

_MOST_BARS = 128  # more would be thinner than a pixel
_COLUMNS = ["question_id", "video_id", "method", "retention_ratio", "kept_per_frame"]


@dataclass(frozen=True)
class Bars:
    """What a method kept of a video at a ratio.

    Attributes:
        path: an outline, a unit a bar across, ``KeptVideo.top`` up.
        n_bars: as many.
        kept: tokens kept, mean over the questions.
        note: about its frames, counted from 0.
    """

    method: str
    title: str
    path: str
    n_bars: int
    kept: float
    note: str


@dataclass(frozen=True, kw_only=True)
class KeptVideo:
    """A video.

    Attributes:
        top: the most tokens that any method kept of a frame, at each ratio; at least 1.
        group: frames that a bar is the mean of.
        n_disagreements: questions about it at a ratio, over all ratios.
    """

    video_id: str
    n_frames: int
    n_questions: int
    n_disagreements: int
    group: int
    top: Mapping[float, float]
    charts: Mapping[float, Sequence[Bars]]


def kept_videos(
    scores: pa.Table, arms: Sequence[Arm], disagreements: Mapping[str, int], most: int = 6
) -> list[KeptVideo]:
    """The videos with most disagreements first.

    Args:
        scores: rows of ``scores.parquet``; those without ``kept_per_frame`` are passed over.
        arms: to show, in this order.
        disagreements: of each question.
        most: so many videos.
    """
    pruned = pc.not_equal(scores["method"], ORIGINAL.method)
    scores = scores.filter(pc.and_(pc.is_valid(scores["kept_per_frame"]), pruned)).select(_COLUMNS)
    video_of = dict(zip(scores["question_id"].to_pylist(), scores["video_id"].to_pylist(), strict=True))
    n_questions = Counter(video_of.values())
    counts = Counter(dict.fromkeys(n_questions, 0))
    for question, count in disagreements.items():
        if question in video_of:
            counts[video_of[question]] += count
    chosen = [video for video, _ in counts.most_common(most)]
    kept: dict[str, dict[Arm, list[list[int]]]] = {video: {} for video in chosen}
    scores = scores.filter(pc.is_in(scores["video_id"], pa.array(chosen, pa.string())))
    for _, video, method, ratio, of_frames in zip(*(scores[name].to_pylist() for name in _COLUMNS), strict=True):
        kept[video].setdefault(Arm(method, ratio), []).append(of_frames)
    videos = (_video(video, arms, kept[video], n_questions[video], counts[video]) for video in chosen)
    return [video for video in videos if video.charts]


def _video(
    video_id: str, arms: Sequence[Arm], rows: Mapping[Arm, list[list[int]]], n_questions: int, n_disagreements: int
) -> KeptVideo:
    n_frames = len(next(iter(rows.values()))[0])
    # A question about a clip of the video may have other frames: only those of as many go together.
    alike = {arm: [kept for kept in rows.get(arm, ()) if len(kept) == n_frames] for arm in arms}
    mean_T = {arm: np.mean(kept, axis=0) for arm, kept in alike.items() if kept and n_frames}
    top: dict[float, float] = {}
    for arm, counts in mean_T.items():
        top[arm.ratio] = max(top.get(arm.ratio, 1.0), float(counts.max()))
    charts: dict[float, list[Bars]] = {}
    for arm, counts in mean_T.items():
        n_ways = len({tuple(kept) for kept in alike[arm]})
        words = _words(counts, len(alike[arm]) if n_ways > 1 else 1)
        charts.setdefault(arm.ratio, []).append(_bars(arm, counts, top[arm.ratio], words))
    return KeptVideo(
        video_id=video_id,
        n_frames=n_frames,
        n_questions=n_questions,
        n_disagreements=n_disagreements,
        group=_group(n_frames),
        top=top,
        charts=charts,
    )


def _group(n_frames: int) -> int:
    return -(-n_frames // _MOST_BARS)


def _bars(arm: Arm, counts: Floats, top: float, note: str) -> Bars:
    group = _group(len(counts))
    heights = [float(part.mean()) for part in np.split(counts, range(group, len(counts), group))]
    outline = "".join(f"V{round(top - height, 1):g}h1" for height in heights)
    path = f"M0 {top:g}{outline}V{top:g}z"
    return Bars(arm.method, title_of(arm.method), path, len(heights), float(counts.sum()), note)


def _words(counts: Floats, n_questions: int) -> str:
    words = [f"most {counts.max():.3g} in frame {counts.argmax()}"]
    if counts.min() == counts.max():
        words = [f"{counts.max():.3g} of every frame"]
    elif empty := int((counts == 0).sum()):
        words.append(f"none of {empty}")
    if n_questions > 1:
        words.append(f"mean of {n_questions} questions")
    return ", ".join(words)
