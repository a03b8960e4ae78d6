"""Times that Qwen3-VL reads on a file whose frame rate varies: the true ones, and those of the stock processor."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers.video_utils import VideoMetadata, load_video

from gstep.backbones import ModelSource
from pipeline import TokenCache
from pipeline.generate.prompts import PreparedQuestion
from tests.builders.answers import prepared, request_about, tiny_cache
from tests.builders.caches import cache_of, encode_clip
from tests.builders.clips import uneven_clip
from tests.gstep.language.prompts import builder
from tests.gstep.stock import stock_video_text

SOURCE = ModelSource.resolve("tiny-qwen3-vl")
FRAMES = 5  # odd: the last one is repeated in a temporal patch
ROW = {"question_id": "1", "video_id": "v", "prompt": "Why?"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return uneven_clip(tmp_path_factory.mktemp("videos") / "uneven.mp4")


@pytest.fixture(scope="module")
def cache(clip, tmp_path_factory) -> Path:
    """Of the whole file, of it from 1.05 s on, and of it as a row that lacks its frame rate."""
    _, whole = encode_clip(SOURCE, clip, FRAMES, "none", 1.0)
    _, late = encode_clip(SOURCE, clip, FRAMES, "none", 1.0, "late", start_s=1.05)
    lacking = replace(whole, record={**whole.record, "video_id": "lacking", "fps": None})
    out = tmp_path_factory.mktemp("caches") / "c"
    cache_of(out, SOURCE, whole, late, lacking)
    return out


def asked(cache, video_id="v", **options):
    """What the actor makes of a question on a video."""
    return prepared(request_about(cache, [{**ROW, "video_id": video_id}], **options))


def text(prompt) -> str:
    return builder(SOURCE.name).tokenizer.decode(prompt.input_ids)


def times(prompt) -> list[float]:
    return [float(seconds) for seconds in re.findall(r"<([0-9.]+) seconds>", text(prompt))]


def stock_prompt(metadata, grid_thw) -> str:
    video = f"<|vision_start|>{stock_video_text(metadata, grid_thw)}<|vision_end|>"
    return f"<|im_start|>user\n{video}Why?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("reader", ["pyav", "decord"])
def test_stock_times_make_the_prompt_of_the_stock_processor_on_the_file_itself(cache, clip, reader):
    pytest.importorskip({"pyav": "av"}.get(reader, reader))
    evenly = partial(np.linspace, 0, 34, FRAMES, dtype=int)  # of the file's 35 frames
    _, metadata = load_video(str(clip), backend=reader, sample_indices_fn=lambda metadata, **_: evenly())
    prompt = asked(cache, frame_times="stock").prompt
    (visual,) = prompt.visuals
    assert list(visual.frame_indices) == list(metadata.frames_indices)
    # Its header states 16.5 frames a second, and readers believe it.
    assert visual.fps == pytest.approx(34 / 2.2) and metadata.fps == pytest.approx(16.5, abs=0.1)
    metadata.fps = visual.fps
    assert text(prompt) == stock_prompt(metadata, visual.extra["video_grid_thw"])


def test_the_times_differ_and_the_true_ones_are_the_default(cache):
    assert text(asked(cache).prompt) == text(asked(cache, frame_times="true").prompt)
    assert times(asked(cache).prompt) == [0.2, 1.0, 2.2]
    assert times(asked(cache, frame_times="stock").prompt) == [0.3, 1.4, 2.2]
    assert isinstance(asked(cache, "lacking"), PreparedQuestion)
    row = asked(cache, "lacking", frame_times="stock")
    assert row["error_class"] == "bad-prompt"
    assert "prune the video again, or use --frame-times true" in row["error_message"]


def test_a_clip_has_stock_times_from_the_start_of_its_file(cache):
    """As qwen-vl-utils hands video_start on: by the places of frames in the file, of which it subtracts nothing."""
    row = TokenCache(cache).metadata("late")
    assert (row["start_s"], row["frame_indices"][0], row["timestamps"][0]) == (1.05, 23, pytest.approx(1.1))
    metadata = VideoMetadata(total_num_frames=12, fps=row["fps"], frames_indices=list(row["frame_indices"]))
    prompt = asked(cache, "late", frame_times="stock").prompt
    assert text(prompt) == stock_prompt(metadata, row["model_extra"]["video_grid_thw"])
    assert times(prompt)[0] == 1.6 and times(asked(cache, "late").prompt)[0] == 0.2


def test_answers_are_of_their_times_where_the_model_reads_any(cache, tmp_path):
    tiny_cache(tmp_path / "c", ("v",))
    for place, stored in ((cache, {"frame_times": "stock"}), (tmp_path / "c", {})):
        plain, stock = (request_about(place, [ROW], frame_times=times).identity for times in ("true", "stock"))
        assert plain == request_about(place, [ROW]).identity and "frame_times" not in plain["prompt"]
        assert stock == {**plain, "prompt": {**plain["prompt"], **stored}}
