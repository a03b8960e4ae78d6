"""The options of a prune run: checked when they are given."""

import argparse
import math

import pytest

from jobs.frame.flags import add_flags, from_flags
from pipeline.errors import UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import make_sampling
from pipeline.video.sampling import Sampling


def test_flags_are_converted():
    parser = argparse.ArgumentParser()
    add_flags(parser, PruneConfig)
    argv = "v --fps 0.5 --max-frames 8 --pruner-param alpha=0.3 --pruner-param radius=2"
    config = from_flags(PruneConfig, parser.parse_args(argv.split()))
    assert (config.videos, config.fps, config.max_frames) == (["v"], 0.5, 8)
    assert config.pruner_params() == {"alpha": "0.3", "radius": "2"}
    assert make_sampling(config, 768) == Sampling(None, fps=0.5, max_frames=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention_ratio": 0.0}, "retention-ratio must be in"),
        ({"retention_ratio": 1.5}, "retention-ratio must be in"),
        ({"retention_ratio": math.nan}, "retention-ratio must be in"),
        ({"num_frames": 0}, "num-frames must be at least 1"),
        ({"fps": -1.0}, "fps must be a positive"),
        ({"fps": 1.0, "num_frames": 4}, "two ways"),
        ({"max_frames": 4}, "goes with --fps"),
        ({"max_failed": "many"}, "count"),
        ({"max_failed": "1.5"}, "share"),
        ({"pruner_param": ["alpha"]}, "NAME=VALUE"),
        ({"videos_per_shard": 0}, "at least 1"),
        ({"target_shard_mb": 0}, "target-shard-mb must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"limit": 2**63}, "limit must be a number below"),
        ({"seed": 10**30}, "seed must be a number below"),
        ({"max_failed": "1e1"}, "--max-failed must be a share"),
        ({"stall_timeout": math.inf}, "stall-timeout must be a positive"),
        ({"stall_timeout": 120.0}, "longer than --decode-timeout 120"),
        ({"decode_timeout": 3600.0}, "--stall-timeout 1800 must be longer"),
        ({"videos": [""]}, "videos must be at least one folder"),
        ({"videos": ["videos", " "]}, "videos must be at least one folder"),
        ({"video_root": [""]}, "video-root must be a folder"),
        ({"gpus": 8}, "--gpus goes with --plan"),
        ({"gpus": 0}, "--gpus goes with --plan"),
        ({"price": ["gpu-hour=1.0"]}, "--price goes with --plan"),
        ({"corpus_videos": 2, "seconds": 1}, "--videos goes with --plan"),
        ({"plan": True, "dry_run": True}, "give one of them"),
        ({"plan": True, "corpus_videos": 0, "seconds": 1}, "whole number, at least 1"),
        ({"plan": True, "corpus_videos": 1.5, "seconds": 1}, "whole number, at least 1"),
        ({"plan": True, "corpus_videos": 10}, "--videos N and --seconds S"),
        ({"plan": True, "seconds": 10}, "--videos N and --seconds S"),
        ({"plan": True, "corpus_videos": 10, "seconds": 10, "videos": ["here"]}, "leave out here"),
        ({"plan": True, "corpus_videos": 10, "seconds": 10, "size": "big"}, "WIDTHxHEIGHT"),
        ({"plan": True, "gpu_type": "A200"}, "--gpu-type must be one of A100"),
        ({"plan": True, "gpu_type": "A100", "gpus": 0}, "do not go together"),
        ({"plan": True, "device": "cpu", "gpus": 8}, "--device cpu goes with neither --gpus nor --gpu-type"),
        ({"plan": True, "device": "cpu", "gpu_type": "A100"}, "--device cpu goes with neither"),
        ({"plan": True, "corpus_videos": 10, "seconds": 10, "probe": 2}, "--probe looks at videos that are here"),
        ({"plan": True, "price": ["gpu-hour=-1"]}, "--price must be a positive number"),
        ({"plan": True, "price": ["gpu-hour=much"]}, "--price gpu-hour=much: it is not a number"),
        ({"plan": True, "price": ["day=1"]}, "--price must be of a gpu-hour, a core-hour or a gb-month, got 'day'"),
        ({"plan": True, "probe": 0}, "--probe must be a positive number"),
        ({"max_hours": 0.0}, "--max-hours must be a positive number"),
    ],
)
def test_nonsense_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        PruneConfig(**options)
