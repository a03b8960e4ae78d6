"""A server tells Qwen3-VL the times of frames that it was started with."""

import json
import re
from dataclasses import asdict

import pytest

from gstep.backbones import ModelSource
from pipeline.errors import UsageError
from pipeline.serve.config import ServeConfig
from pipeline.serve.prompts import CachedPrompts, ServedCache
from pipeline.serve.server import served_cache
from tests.pipeline.encoding import cache_of, encode_clip
from tests.pipeline.videos import uneven_clip

NAME = "tiny-qwen3-vl"
ASKED = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "cache://v"}}]}]


def times(served: ServedCache) -> list[str]:
    prompts = CachedPrompts(served)
    conversation = prompts.read(ASKED)
    ids = prompts.prompt(conversation, [prompts.find(link).result() for link in conversation.links]).input_ids
    return re.findall(r"<([0-9.]+) seconds>", prompts.builder.tokenizer.decode(ids))


def test_the_flag_decides_the_times_of_every_prompt(tmp_path):
    source = ModelSource.resolve(NAME)
    _, video = encode_clip(source, uneven_clip(tmp_path / "uneven.mp4"), 5, "none", 1.0)
    cache_of(tmp_path / "c", source, video)
    config = ServeConfig(cache=str(tmp_path / "c"), frame_times="stock")
    told = json.loads(json.dumps(asdict(served_cache(config))))  # as it reaches the renderer
    assert told["frame_times"] == "stock" and times(ServedCache(**told)) == ["0.3", "1.4", "2.2"]
    assert times(ServedCache(cache=config.cache, model=NAME)) == ["0.2", "1.0", "2.2"]


def test_times_that_do_not_exist_are_refused_by_the_flag():
    with pytest.raises(UsageError, match=r"--frame-times must be one of \(.true., .stock.\)"):
        ServeConfig(frame_times="guessed")
