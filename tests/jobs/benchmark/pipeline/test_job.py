"""The encoder that sleeps gives what a cache stores."""

import time

import numpy as np
import pytest

from gstep.backbones import ModelSource
from jobs.benchmark.pipeline.job import SleepingSetup
from jobs.benchmark.pipeline.work import HIDDEN, KEPT_BYTES_PER_FRAME, SIDE
from pipeline.prune.batches import encoded_bundle, encoded_videos


@pytest.mark.parametrize("frames", [2, 4])
def test_tokens_travel_and_have_the_size_of_a_quarter(frames):
    setup = SleepingSetup(ModelSource.resolve("tiny"), "gstep", 0.25, work_s=0.02)
    assert setup.bytes_per_video(frames, SIDE, SIDE) == frames * KEPT_BYTES_PER_FRAME
    encoder = setup.encoder()
    started = time.perf_counter()
    made = encoder.encode_one({"video_id": "a", "status": "ok"}, np.zeros((frames, SIDE, SIDE, 3), np.uint8))
    assert time.perf_counter() - started >= 0.02
    (video,) = encoded_videos(encoded_bundle([made]))
    assert video.kept.tokens.nbytes == frames * KEPT_BYTES_PER_FRAME
    assert video.record["n_tokens"] == frames * 49 and video.record["hidden_size"] == HIDDEN
    assert sorted(video.kept.rank) == list(range(frames * 49)) and video.record["encode_s"] == 0.02
