"""The model family that sleeps."""

import time

import numpy as np

from gstep.backbones import ModelSource
from jobs.benchmark.pipeline_work import KEPT_BYTES_PER_FRAME, SIDE
from jobs.benchmark.sleeping import FAMILY, write_model
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder


def test_a_sleeping_backbone_sleeps_once_a_video_and_its_tokens_have_the_size_of_a_quarter(tmp_path):
    source = ModelSource.resolve(write_model(tmp_path / "model", 0.02), family=FAMILY)
    setup = EncodeSetup(source, "random", 0.25, device="cpu")
    assert setup.estimate_video_bytes(2, SIDE, SIDE) == 2 * KEPT_BYTES_PER_FRAME
    encoder, started = VideoEncoder(setup), time.perf_counter()
    record = {"video_id": "a", "status": "ok", "height": SIDE, "width": SIDE, "fps": 30.0, "clip_frames": 2}
    record |= {"frame_indices": [0, 1], "timestamps": [0.0, 0.1]}
    frames = np.zeros((2, SIDE, SIDE, 3), np.uint8)
    first, second = (encoder.encode_video_alone(record, frames) for _ in range(2))
    assert time.perf_counter() - started >= 2 * 0.02 and first.record["encode_s"] >= 0.02
    assert first.kept.tokens.nbytes == 2 * KEPT_BYTES_PER_FRAME and sorted(first.kept.rank) == list(range(2 * 49))
    assert np.array_equal(first.kept.tokens, second.kept.tokens)
