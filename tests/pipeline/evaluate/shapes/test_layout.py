"""A folder as VideoMME is published, read as any other benchmark; its videos come back frame by frame."""

import ctypes
import io
import multiprocessing
import random
from dataclasses import replace

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.request import get_frame_rule_name
from pipeline.evaluate.scores import make_question_table
from pipeline.evaluate.shapes import layout
from pipeline.evaluate.shapes.layout import ANNOTATIONS, CorpusRecipe, write_benchmark, write_mp4
from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.render import render
from pipeline.evaluate.shapes.world import DEVELOPMENT
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.probe import probe
from pipeline.video.sampling import ROUND_EVEN, Sampling, choose_frames
from tests.builders.clips import KeepSize
from tests.paths import read_all
from tests.pipeline.evaluate.shapes.shape_videos import videos
from tests.pipeline.evaluate.videomme import SCHEMA

SHAPES = BENCHMARKS["shapes"]
SMALL = CorpusRecipe(n_videos=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("made") / "shapes"
    write_benchmark(place, SMALL)
    return place


def test_columns_and_cells_are_those_of_videomme_and_every_row_is_a_question_of_its_video(folder):
    table = pq.read_table(folder / ANNOTATIONS)
    assert table.schema.equals(SCHEMA)
    row = table.to_pylist()[0]
    assert row["options"][1].startswith("B. ") and row["answer"] in "ABCD"
    assert (row["video_id"], row["question_id"], row["videoID"]) == ("001", "001-1", f"shapes-{DEVELOPMENT[0]}")
    loaded = SHAPES.load(folder)
    asked = [question for video in videos(6, split="development") for question in ask(video)]
    assert not loaded.faults and len(loaded.items) == len(asked) == loaded.n_annotated
    for item, question in zip(loaded.items, asked, strict=True):
        assert (item.question, item.options, item.answer) == (question.prompt, question.choices, question.answer)
        assert item.splits["task_type"] == question.type and item.splits["sub_category"] == question.kind
        assert item.splits["domain"] == "plain" and item.cluster in item.video_id
    assert {item.splits["duration"] for item in loaded.items} == {"short", "medium", "long"}


def test_choices_are_asked_with_one_letter_each_and_every_frame_is_taken(folder):
    protocol, items = SHAPES.protocol(), SHAPES.load(folder).items
    asked = make_question_table(items, protocol, "llava_onevision").to_pylist()
    assert asked[0]["choices"] == list(items[0].options)
    for family in ("llava_onevision", "qwen3_vl"):
        rule = protocol.get_rules(family).frames
        sampling = Sampling(num_frames=rule.num_frames, rule=get_frame_rule_name(rule))
        assert [choose_frames(np.arange(n, dtype=float), sampling).tolist() for n in (8, 32)] == [
            list(range(n)) for n in (8, 32)
        ]


def test_making_it_again_writes_the_same_bytes_and_mends_what_is_missing(tmp_path, folder):
    whole = read_all(folder)
    again = tmp_path / "again"
    write_benchmark(again, SMALL)
    assert read_all(again) == whole
    (again / ANNOTATIONS).unlink()
    next((again / "data").iterdir()).write_bytes(b"half")
    write_benchmark(again, SMALL)
    assert read_all(again) == whole


def test_the_bytes_do_not_depend_on_what_was_in_memory_before():
    """x264 reads memory before it is set where its macroblock tree is on, which made bytes differ between runs."""
    context = multiprocessing.get_context("fork")  # the settings of malloc are left to the child
    child = context.Process(target=write_amid_dirt)
    child.start()
    child.join()
    assert child.exitcode == 0


def write_amid_dirt():
    libc, rng = ctypes.CDLL(None), random.Random(0)
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    for kind in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD: freed memory comes back with its content
        libc.mallopt(kind, 1 << 30)
    for film in CorpusRecipe(n_videos=40).videos():
        frames, made = render(film.video), set()
        for _ in range(6):
            sizes = [int(10 ** rng.uniform(2, 6)) for _ in range(200)]
            blocks = [libc.memset(libc.malloc(size), rng.randrange(256), size) for size in sizes]
            for block in blocks:
                libc.free(block)
            file = io.BytesIO()
            write_mp4(file, frames)
            made.add(file.getvalue())
        assert len(made) == 1, film.path


def test_keyframes_are_as_far_apart_as_asked(tmp_path):
    write_benchmark(tmp_path / "k", CorpusRecipe(n_videos=1, durations=("long",), keyframe_seconds=10))
    (path,) = (tmp_path / "k/data").iterdir()
    index = probe(str(path), "mov")
    assert index.timestamps[np.isin(index.pts, index.keyframes)].tolist() == [0, 10, 20, 30]


def test_a_folder_that_was_left_halfway_is_no_benchmark(tmp_path):
    def kill(done):
        raise KeyboardInterrupt

    for progress in (kill, lambda done: None, kill):  # a new one, a whole one, one that was whole
        try:
            write_benchmark(tmp_path / "d", CorpusRecipe(n_videos=2), progress)
        except KeyboardInterrupt:
            with pytest.raises(UsageError, match="no annotations of Shapes in it"):
                SHAPES.load(tmp_path / "d")
        else:
            assert len(SHAPES.load(tmp_path / "d").items) >= 12


def test_another_recipe_or_another_content_is_not_written_over(tmp_path, folder):
    before = read_all(folder)
    (tmp_path / "notes.txt").write_text("mine")
    for place, recipe, why in (
        (folder, replace(SMALL, hardness=("dim",)), "holds videos of another recipe"),
        (folder, replace(SMALL, keyframe_seconds=10), "holds videos of another recipe"),
        (tmp_path, SMALL, "holds something else"),
        (tmp_path / "notes.txt", SMALL, "is a file: name a folder"),
    ):
        with pytest.raises(UsageError, match=why):
            write_benchmark(place, recipe)
    assert read_all(folder) == before and [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"durations": ("short", "tall")}, "--durations tall: unknown; known are short, medium, long"),
        ({"hardness": ()}, "--hardness must name at least one"),
        ({"keyframe_seconds": 10**9}, "--keyframe-seconds must be 1 to 1,000,000, got 1000000000"),
        ({"n_videos": 0}, "--videos must be 1 to 10000"),
        ({"seed": -1}, "--seed must be 0 to 99"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        CorpusRecipe(**options)


@pytest.mark.parametrize(("length", "decoder"), [(0, "auto"), (1, "pyav")])
def test_every_way_of_sampling_takes_each_rendered_frame_once(tmp_path, length, decoder):
    video = videos(3)[length]
    count, path = video.n_frames, tmp_path / "v.mp4"
    write_mp4(path, render(video))
    for sampling in (
        Sampling(num_frames=None, fps=1, max_frames=32),
        Sampling(num_frames=count),
        Sampling(num_frames=32, rule=ROUND_EVEN),
    ):
        decoded = decode_video(DecodeRequest(path, sampling, KeepSize(), decoder=decoder))
        assert decoded.frame_indices.tolist() == list(range(count)) == decoded.timestamps.tolist()
        about = {"fps": 1.0, "duration_s": float(count), "codec": "h264", "n_repeated": 0}
        assert {name: decoded.record[name] for name in about} == about
        assert abs(decoded.frames.astype(int) - layout.read_mp4(path)).max() <= 2


def test_a_picture_has_every_frame_in_its_place(tmp_path):
    short, long = (np.full((count, 4, 6, 3), 200, np.uint8) for count in (2, 5))
    short[1] = 90
    layout.write_picture(tmp_path / "p.png", [short, long], columns=3, scale=2)
    with av.open(str(tmp_path / "p.png")) as file:
        (picture,) = (frame.to_ndarray(format="rgb24") for frame in file.decode(video=0))
    assert picture.shape == (2 * (4 + 4 + 8), 2 * 18, 3)
    assert picture[4, 4].tolist() == [200] * 3 and picture[4, 16].tolist() == [90] * 3
    assert picture[4, 28].tolist() == [0] * 3 and picture[12, 4].tolist() == [255] * 3
    assert picture[28, 16].tolist() == [200] * 3 and picture[28, 28].tolist() == [0] * 3
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
