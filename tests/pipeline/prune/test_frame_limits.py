"""Videos whose number of frames a limit changes, over all families: from the file to the lines that say so."""

import json
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from jobs import inspect
from pipeline import TokenCache
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.frame_limits import describe_future_limits, describe_sampling
from pipeline.prune.recipe import Recipe, make_sampling_identity, resolve_recipe
from pipeline.rows import VideoRecord, describe_frames, format_rate, make_todo_row
from pipeline.video.sampling import Sampling, choose_frames, count_frames_by_rate
from tests.builders.caches import decode_row_of, write_header, write_shard
from tests.builders.clips import uneven_clip, write_clip

GENERIC = ("tiny-qwen3-vl", "generic")
QWEN = [("tiny-qwen2-5-vl", None), ("tiny-qwen3-vl", None)]
FAMILIES = [("tiny", None), ("tiny-internvl", None), *QWEN, GENERIC]

each_family = pytest.mark.parametrize(("model", "family"), FAMILIES, ids=lambda value: value or "own")


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> dict[str, Path]:
    """A video of 40 s, one of 4 s and one of half a second."""
    folder = tmp_path_factory.mktemp("videos")
    lengths = {"long.mp4": (200, 5), "fits.mp4": (20, 5), "half.mp4": (12, 24)}
    return {name: write_clip(folder / name, count=n, fps=fps) for name, (n, fps) in lengths.items()}


def make_recipe(model: str, family: str | None, **options) -> Recipe:
    return resolve_recipe(PruneConfig(model=model, family=family, fps=1.0, device="cpu", dtype="float32", **options))


def decode(recipe: Recipe, videos: dict[str, Path]) -> dict[str, tuple[VideoRecord, object]]:
    with closing(VideoDecoder(recipe.make_decode_setup())) as decoder:
        return {name: decode_row_of(decoder, path, name) for name, path in videos.items()}


@each_family
def test_the_default_limits_of_a_family_are_in_the_rows(videos, model, family):
    rows = {name: row for name, (row, _) in decode(make_recipe(model, family), videos).items()}
    is_qwen = (model, family) in QWEN
    counts = {name: (len(row["frame_indices"]), row["frames_by_rate"]) for name, row in rows.items()}
    if is_qwen:  # at most 768, at least 4
        assert counts == {"long.mp4": (40, 0), "fits.mp4": (4, 0), "half.mp4": (4, 1)}
    else:  # at most 32
        assert counts == {"long.mp4": (32, 40), "fits.mp4": (4, 0), "half.mp4": (1, 0)}


@pytest.mark.parametrize(("model", "family"), [FAMILIES[0], FAMILIES[-2], GENERIC])
def test_a_limit_is_told_of_the_cache_and_of_each_video(videos, model, family, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    recipe = make_recipe(model, family, max_frames=6)
    short = {} if family else {"half.mp4": videos["half.mp4"]}  # a single frame is too short for the generic model
    encoder = recipe.make_encode_setup("cpu", "float32").encoder()
    chosen = {name: videos[name] for name in ("long.mp4", "fits.mp4")} | short
    items = [encoder.encode_video_alone(record, frames) for record, frames in decode(recipe, chosen).values()]
    store = write_header(tmp_path / "c", identity=recipe.identity("float32"))
    write_shard(store, "run", *items)
    is_qwen = (model, family) in QWEN

    capped = "1 video was capped at 6 frames (lowest rate 0.15 frames per second, of long.mp4); --max-frames raises it"
    filled = "1 short video got more frames than --fps 1 gives, since this model takes at least 4"

    def inspected(*argv: str) -> str:
        assert inspect.main([str(store), *argv]) == 0
        return capsys.readouterr().out

    text = inspected()
    assert text.count(capped) == 1 and text.count(filled) == is_qwen and "older version" not in text
    limits = json.loads(inspected("--json"))["frame_limits"]
    assert (limits["n_capped"], limits["n_filled"], limits["lowest_fps"]) == (1, int(is_qwen), pytest.approx(0.15))

    video = TokenCache(tmp_path / "c").get("long.mp4")
    patches = " in 3 temporal patches" if "qwen" in model else ""
    words = f"source fps 5, sampled at 0.15 fps, 6 frames{patches}"
    assert video.describe_frames() == words and video.sampled_fps == pytest.approx(0.15)
    text = inspected("long.mp4")
    assert f"sampled  {words}" in text
    assert "limit    --fps 1 gives 40 frames of this clip, capped at 6; --max-frames raises it, in a new cache" in text
    assert ("each t is a temporal patch of two sampled frames" in text) == bool(patches)
    sampling = json.loads(inspected("long.mp4", "--json"))["sampling"]
    assert sampling.pop("text").startswith(words)
    assert sampling == {
        **{"source_fps": 5.0, "asked_fps": 1.0, "sampled_fps": pytest.approx(0.15), "asked_frames": 40},
        **{"sampled_frames": 6, "temporal_patches": 3 if patches else 6},
    }
    assert "limit" not in inspected("fits.mp4")
    assert not is_qwen or "--fps 1 gives 1 frame of this clip, filled up to 4" in inspected("half.mp4")


def test_a_video_whose_rate_varies_is_capped_and_says_that_its_rate_is_an_average(tmp_path):
    clip = uneven_clip(tmp_path / "uneven.mp4")  # 2.3 s, 35 frames
    row, _ = decode(make_recipe("tiny", None, max_frames=2), {"v": clip})["v"]
    assert row["frames_by_rate"] == 3
    words = describe_frames({**row, "n_frames": 2})
    assert words.startswith("source fps ") and " on average, sampled at 0.87 fps, 2 frames" in words


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(8), None),
        (Sampling(None, 1.0, 4), 10),
        (Sampling(None, 1.0, 10), 0),
        (Sampling(None, 1.0, None), 0),
        (Sampling(None, 0.1, 8, min_frames=4), 1),
        (Sampling(None, 1.0, 2, min_frames=4), 10),
        (Sampling(None, 1e300, 32), 2**31 - 1),
    ],
)
def test_the_frames_by_rate_are_known_where_a_limit_changed_them(sampling, expected):
    times = [i / 4 for i in range(40)]
    n_frames = len(choose_frames(pa.array(times).to_numpy(), sampling, None, None, 10.0))
    assert count_frames_by_rate(n_frames, pa.array(times).to_numpy(), sampling, None, None, 10.0) == expected


def test_a_dry_run_tells_at_which_lengths_limits_begin_and_which_clips_of_the_list_are_so_long():
    clips = [(None, 60.0), (10.0, 20.0), (10.0, 11.0), (None, None), (3.0, None)]
    rows = [make_todo_row(f"v{i}", "/v.mp4", start, end) for i, (start, end) in enumerate(clips)]
    todo = pa.Table.from_pylist(rows, schema=TODO_SCHEMA)
    lines = list(describe_future_limits({"fps": 2.0, "max_frames": 32, "min_frames": 4}, todo))
    assert [line.partition(" by start and end")[0] for line in lines] == [
        "a video of more than 16 s is capped at 32 frames; --max-frames raises it, in a new cache; 1 clip",
        "a video of at most 1.5 s gets 4 frames if it has them, for this model; 1 clip",
    ]
    assert len(list(describe_future_limits({"fps": 2.0, "max_frames": None}, todo))) == 0
    assert list(describe_future_limits({"num_frames": 8}, todo)) == []


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"num_frames": 1}, "1 frame per video (--num-frames): evenly spread"),
        ({"fps": 1.0, "max_frames": 32}, "1 frame per second (--fps), at most 32 per video (--max-frames)"),
        ({"fps": 0.5, "max_frames": None}, "0.5 frames per second (--fps)"),
        (make_sampling_identity(Sampling(None, 2.0, 768, min_frames=4)), "2 frames per second (--fps), at most 768"),
        (make_sampling_identity(Sampling(8, rule="round-even")), "8 frames per video (--num-frames): positions are"),
        (make_sampling_identity(Sampling(8, snap_to_keyframes_s=1.0)), "evenly spread; moved to a keyframe within 1 s"),
        ({}, "not stated"),
    ],
)
def test_sampling_is_told_in_words(sampling, words):
    assert words in describe_sampling(sampling)


def test_rates_have_the_digits_that_count():
    rates = (25.0, 30000 / 1001, 32 / 120, 1 / 300, 1.0, None)
    assert list(map(format_rate, rates)) == ["25", "29.97", "0.27", "0.0033", "1", "unknown"]
