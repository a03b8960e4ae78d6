"""Clips and folders of frames end to end: MVBench of revision main, real videos, a real Ray, the tiny model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import evaluate
from pipeline import TokenCache
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.video.frame_folders import JPEGS
from tests.builders.runs import committed, said_by
from tests.pipeline.evaluate.mvbench import FRAMES, write_main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

N_QUESTIONS = 14


def evaluated(data: Path, out: Path, *methods: str) -> str:
    """What the command says."""
    light = ("--num-frames", "4", "--draws", "200", "--retention-ratio", "0.25")
    argv = ["--benchmark", "mvbench", "--data", str(data), "--out", str(out), *light, "--method", *methods]
    said = said_by(evaluate, *argv)
    return said


def test_every_clip_and_folder_of_frames_is_encoded_once_and_every_question_is_answered(tmp_path):
    """Of revision main; that of the videos that are cut already differs in its annotations alone."""
    data, out = write_main(tmp_path / "d"), tmp_path / "r"
    said = evaluated(data, out, "gstep")
    items = BENCHMARKS["mvbench"].load(data).items
    scores = pq.read_table(out / "scores.parquet")
    assert set(scores["status"].to_pylist()) == {"ok"} and len(scores) == 2 * len(items) == 2 * N_QUESTIONS
    cache = TokenCache(out / "cache")
    assert Counter(committed(cache.store)) == Counter({item.video_id for item in items})
    assert "1 missing-video, left out" in said and "not the published one" in said
    assert "MVBench" in (out / "report.html").read_text()
    clip = cache.get("video/star/Charades_v1_480/-B1CD.mp4#t=1.5,9").metadata
    assert (clip["start_s"], clip["end_s"], clip["clip_frames"]) == (1.5, 9.0, 30)
    frames = cache.get(f"video/tvqa/frames_fps3_hq/{FRAMES}#t=0,4").metadata
    assert (frames["backend"], frames["fps"], frames["clip_frames"]) == (JPEGS, 3.0, 12)
    assert frames["frame_indices"] == [0, 3, 7, 11]  # of 00001.jpg to 00012.jpg
    evaluated(data, out, "gstep", "uniform")  # goes on: no video is taken for changed, and none encoded again
    assert Counter(committed(cache.store)) == Counter({item.video_id for item in items})
    assert len(pq.read_table(out / "scores.parquet")) == 3 * len(items)
