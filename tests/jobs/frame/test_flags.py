"""Flags and files of options: complete, grouped, converted, and refused by name."""

import argparse
import re
from dataclasses import dataclass, fields

import pytest

from jobs.frame.flags import add_flags, from_flags, read_config_file
from pipeline.errors import UsageError
from pipeline.generate.config import GenerateConfig
from pipeline.options import S3Options, option
from pipeline.prune.config import PruneConfig


def parser_of(config: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    return parser


def parse(*argv: str) -> PruneConfig:
    return from_flags(PruneConfig, parser_of(PruneConfig).parse_args(argv))


def help_of(config: type) -> str:
    return " ".join(parser_of(config).format_help().split())


@pytest.mark.parametrize("config", [PruneConfig, GenerateConfig, S3Options])
def test_every_field_is_a_flag_with_help(config):
    text = help_of(config)
    for item in fields(config):
        assert item.metadata["help"]
        flag = item.metadata.get("flag", f"--{item.name.replace('_', '-')}")
        assert item.metadata.get("positional") or f"{flag} " in text
    assert "{item}" not in text


@dataclass(frozen=True, kw_only=True)
class Shared:
    size: int = option(0, "size of a {item}", group="second")
    noise: float = option(0.0, "its noise")
    colour: str | None = option(None, "its colour", group="first")


@dataclass(frozen=True, kw_only=True)
class Own(Shared):
    item = "cat"
    name: str = option("Tom", "name of the {item}", group="first")
    age: int | None = option(None, "in years", group="second")


def test_groups_stand_in_order_a_class_s_own_options_first():
    text = help_of(Own)
    parts = r"--name .*name of the cat \[Tom\] .*--colour .*second: .*--age .*--size .*size of a cat \[0\] .*--noise"
    assert re.search(f"first: .*{parts}", text)
    assert "its noise [0.0]" in text and "its colour [" not in text


def test_no_flags_are_the_defaults_and_words_and_numbers_that_look_like_others_stay_what_they_are():
    assert parse() == PruneConfig()
    config = parse("--revision", "None", "--s3-endpoint", "", "--fps", "2", "--pruner-param", "a=1", "v")
    assert (config.revision, config.s3_endpoint, config.fps, config.videos) == ("None", "", 2.0, ["v"])


def test_a_configuration_file_holds_every_option_and_may_say_it_plainly(tmp_path):
    text = "num-frames: 8\nretention_ratio: 1\npruner-param: [alpha=0.3]\nmodel: tiny\nfps:\n"
    (tmp_path / "c.yaml").write_text(f"{text}max-failed: 0.05\nvideo-root:\nretry-failed: true\n")
    expected = {"num_frames": 8, "retention_ratio": 1.0, "pruner_param": ["alpha=0.3"], "model": "tiny", "fps": None}
    expected |= {"max_failed": "0.05", "video_root": [], "retry_failed": True}
    assert read_config_file(str(tmp_path / "c.yaml"), PruneConfig) == expected
    assert parse("--no-retry-failed").retry_failed is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frames: 8", "unknown option frames"),
        ("config: other.yaml", "unknown option"),
        ("num-frames: many", "num_frames must be a whole number"),
        ("retry-failed: 1", "retry_failed must be true or false"),
        ("pruner-param: alpha=1", "must be a list"),
        ("num-frames: 1\nnum_frames: 2", "num-frames is given twice"),
        ("- 1", "expected options"),
        ("a: [", "c.yaml"),
    ],
)
def test_a_bad_configuration_file_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_config_file(str(tmp_path / "c.yaml"), PruneConfig)
