"""The options of a prune run: checked when they are given."""

import argparse

import pytest

from jobs.frame.flags import add_flags, from_flags
from pipeline.errors import UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import make_sampling
from pipeline.video.sampling import Sampling


def parse(*argv: str) -> PruneConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, PruneConfig)
    return from_flags(PruneConfig, parser.parse_args(argv))


def test_flags_are_converted():
    config = parse(
        "v", "--fps", "0.5", "--max-frames", "8", "--pruner-param", "alpha=0.3", "--pruner-param", "radius=2"
    )
    assert (config.videos, config.fps, config.max_frames) == (["v"], 0.5, 8)
    assert config.pruner_params() == {"alpha": "0.3", "radius": "2"}
    assert make_sampling(config, 768) == Sampling(None, fps=0.5, max_frames=8)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--retention-ratio", "0"], "retention-ratio must be in"),
        (["--retention-ratio", "1.5"], "retention-ratio must be in"),
        (["--retention-ratio", "nan"], "retention-ratio must be in"),
        (["--num-frames", "0"], "num-frames must be at least 1"),
        (["--fps", "-1"], "fps must be a positive"),
        (["--fps", "1", "--num-frames", "4"], "two ways"),
        (["--max-frames", "4"], "goes with --fps"),
        (["--max-failed", "many"], "count"),
        (["--max-failed", "1.5"], "share"),
        (["--pruner-param", "alpha"], "NAME=VALUE"),
        (["--videos-per-shard", "0"], "at least 1"),
        (["--target-shard-mb", "0"], "target-shard-mb must be at least 1"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--stall-timeout", "inf"], "stall-timeout must be a positive"),
        (["--stall-timeout", "120"], "longer than --decode-timeout 120"),
        (["--decode-timeout", "3600"], "--stall-timeout 1800 must be longer"),
        ([""], "videos must be at least one folder"),
        (["videos", " "], "videos must be at least one folder"),
        (["--video-root", ""], "video-root must be a folder"),
    ],
)
def test_nonsense_is_refused_by_name(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(*argv)
