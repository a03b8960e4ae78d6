"""The options of a prune run: checked when they are given."""

import argparse

import pytest

from gstep.backbones import BACKBONES
from jobs.flags import add_flags, from_flags
from pipeline.cache.header import differences
from pipeline.errors import UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.request import sampling_of
from pipeline.video.sampling import Sampling


def parse(*argv: str) -> PruneConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, PruneConfig)
    return from_flags(PruneConfig, parser.parse_args(argv))


def test_flags_are_converted():
    config = parse(
        "v", "--fps", "0.5", "--max-frames", "8", "--pruner-param", "alpha=0.3", "--pruner-param", "radius=2"
    )
    assert (config.videos, config.fps, config.max_frames) == ("v", 0.5, 8)
    assert config.pruner_params() == {"alpha": "0.3", "radius": "2"}
    assert sampling_of(config, 768) == Sampling(None, fps=0.5, max_frames=8)


def test_the_limit_of_frames_is_the_model_familys():
    defaults = {name: backbone.default_max_frames for name, backbone in BACKBONES.items()}
    assert defaults == {"llava_onevision": 32, "qwen2_5_vl": 768, "qwen3_vl": 768}
    assert sampling_of(parse("v", "--fps", "2"), 768) == Sampling(None, fps=2.0, max_frames=768)
    assert sampling_of(parse("v"), 768) == Sampling(32)


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
    ],
)
def test_nonsense_is_refused_by_name(argv, message):
    with pytest.raises(UsageError, match=message):
        parse(*argv)


@pytest.mark.parametrize(("text", "limit"), [(None, 9), ("3", 3), ("0", 0), ("0.25", 2), ("50%", 5), ("1.0", 10)])
def test_failure_limit(text, limit):
    assert PruneConfig(max_failed=text).failure_limit(10) == limit


def test_differences_name_the_leaf():
    lines = differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    assert lines == ["a.c: the cache has 2, this run 3"]


def test_a_record_tells_no_secret():
    record = PruneConfig(s3_endpoint="http://store.example:9000", s3_region="eu").as_record()
    assert (record["s3_endpoint"], record["s3_region"]) == ("(set)", "eu")
    assert PruneConfig().as_record()["s3_endpoint"] is None


def test_choices_hold_without_flags_too():
    with pytest.raises(UsageError, match="--dtype must be one of"):
        PruneConfig(dtype="int8")
