"""A folder as VideoMME is published, read as any other benchmark."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS, find_benchmark
from pipeline.evaluate.request import frame_rule
from pipeline.evaluate.scores import question_table
from pipeline.evaluate.shapes.layout import ANNOTATIONS, Recipe, write_benchmark
from pipeline.evaluate.shapes.questions import TYPES, ask
from pipeline.evaluate.shapes.world import DEVELOPMENT, SEEDS
from pipeline.inputs.manifest import read_manifest
from pipeline.video.probe import probe
from pipeline.video.sampling import Sampling, choose_frames
from tests.pipeline.evaluate.shapes.shape_videos import videos
from tests.pipeline.evaluate.videomme import SCHEMA

SHAPES, VIDEOMME = BENCHMARKS["shapes"], BENCHMARKS["videomme"]
SMALL = Recipe(n_videos=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("made") / "shapes"
    write_benchmark(place, SMALL)
    return place


def bytes_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_columns_and_cells_are_those_of_videomme(folder):
    table = pq.read_table(folder / ANNOTATIONS)
    assert table.schema.equals(SCHEMA)
    row = table.to_pylist()[0]
    assert row["options"][1].startswith("B. ") and row["answer"] in "ABCD"
    assert (row["video_id"], row["question_id"], row["videoID"]) == ("001", "001-1", f"shapes-{DEVELOPMENT[0]}")


def test_every_row_is_a_question_of_its_video(folder):
    loaded = SHAPES.load(folder)
    asked = [question for video in videos(6, split="development") for question in ask(video)]
    assert not loaded.faults and len(loaded.items) == len(asked) == loaded.n_annotated
    for item, question in zip(loaded.items, asked, strict=True):
        assert (item.question, item.options, item.answer) == (question.prompt, question.choices, question.answer)
        assert item.splits["task_type"] == question.type and item.splits["sub_category"] == question.kind
        assert item.splits["domain"] == "plain" and item.cluster in item.video_id
    assert {item.splits["duration"] for item in loaded.items} == {"short", "medium", "long"}


def test_the_same_folder_is_a_videomme(folder):
    ours, theirs = SHAPES.load(folder).items, VIDEOMME.load(folder).items
    assert [(one.question_id, one.video_id, one.answer) for one in ours] == [
        (one.question_id, one.video_id, one.answer) for one in theirs
    ]
    assert theirs[0].options == tuple(f"{letter}. {text}" for letter, text in zip("ABCD", ours[0].options, strict=True))


def test_choices_are_asked_with_one_letter_each_and_every_frame_is_taken(folder):
    protocol, items = SHAPES.protocol(), SHAPES.load(folder).items
    assert protocol.name == "letter"
    asked = question_table(items, protocol, "llava_onevision").to_pylist()
    assert asked[0]["choices"] == list(items[0].options)
    for family in ("llava_onevision", "qwen2_5_vl", "qwen3_vl"):
        rule = protocol.rules(family).frames
        sampling = Sampling(num_frames=rule.num_frames, rule=frame_rule(rule))
        for n_frames in (8, 16, 32):
            assert choose_frames(np.arange(n_frames, dtype=float), sampling).tolist() == list(range(n_frames))


def test_a_row_that_holds_no_options_is_a_fault_and_no_crash(tmp_path, folder):
    made = Path(shutil.copytree(folder, tmp_path / "made"))
    table = pq.read_table(made / ANNOTATIONS)
    first, second, *rest = table.to_pylist()
    rows = [first | {"options": None}, second | {"options": ["A. x", None]}, *rest]
    pq.write_table(table.from_pylist(rows, schema=table.schema), made / ANNOTATIONS)
    loaded = SHAPES.load(made)
    assert [(fault.kind, fault.question_id) for fault in loaded.faults] == [("bad-row", "001-1"), ("bad-row", "001-2")]
    assert len(loaded.items) == len(rest)


def test_questions_are_also_questions_of_ones_own(folder):
    own = find_benchmark(str(folder / "questions.jsonl")).load(folder).items
    ours = SHAPES.load(folder).items
    assert [(one.question_id, one.video_ids, one.question, one.options, one.answer) for one in own] == [
        (one.question_id, one.video_ids, one.question, one.options, one.answer) for one in ours
    ]
    assert [one.splits["split"] for one in own] == [one.splits["task_type"] for one in ours]


def test_the_manifest_names_the_videos_as_their_folder_does(folder):
    named, found = read_manifest(str(folder / "manifest.jsonl")), read_manifest(str(folder))
    assert sorted(named["video_id"].to_pylist()) == sorted(found["video_id"].to_pylist())
    assert all(
        path.endswith(name) for name, path in zip(*(named[c].to_pylist() for c in ("video_id", "uri")), strict=True)
    )
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert [row["n_frames"] for row in rows] == [8, 16, 32] * 2 and {row["seeds"] for row in rows} == {"development"}


def test_making_it_again_writes_the_same_bytes_and_mends_what_is_missing(tmp_path, folder):
    whole = bytes_of(folder)
    again = tmp_path / "again"
    write_benchmark(again, SMALL)
    assert bytes_of(again) == whole
    (again / ANNOTATIONS).unlink()
    next((again / "data").iterdir()).write_bytes(b"half")
    write_benchmark(again, SMALL)
    assert bytes_of(again) == whole


def test_keyframes_are_as_far_apart_as_asked(tmp_path):
    recipe = Recipe(n_videos=1, durations=("long",), keyframe_seconds=10)
    write_benchmark(tmp_path / "k", recipe)
    (path,) = (tmp_path / "k/data").iterdir()
    index = probe(str(path), "mov")
    assert index.timestamps[np.isin(index.pts, index.keyframes)].tolist() == [0, 10, 20, 30]
    with pytest.raises(UsageError, match="another recipe"):
        write_benchmark(tmp_path / "k", replace(recipe, keyframe_seconds=None))


def test_a_folder_that_was_left_halfway_is_no_benchmark(tmp_path):
    def kill(done):
        raise KeyboardInterrupt

    for progress in (kill, lambda done: None, kill):  # a new one, a whole one, one that was whole
        try:
            write_benchmark(tmp_path / "d", Recipe(n_videos=2), progress)
        except KeyboardInterrupt:
            with pytest.raises(UsageError, match="no annotations of Shapes in it"):
                SHAPES.load(tmp_path / "d")
        else:
            assert len(SHAPES.load(tmp_path / "d").items) >= 12


def test_another_recipe_or_another_content_is_not_written_over(tmp_path, folder):
    before = bytes_of(folder)
    for other in (replace(SMALL, seed=1), replace(SMALL, n_videos=5), replace(SMALL, hardness=("dim",))):
        with pytest.raises(UsageError, match="holds videos of another recipe"):
            write_benchmark(folder, other)
    assert bytes_of(folder) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        write_benchmark(tmp_path, SMALL)
    with pytest.raises(UsageError, match="is a file: name a folder"):
        write_benchmark(tmp_path / "notes.txt", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "dev"}, "--split dev: unknown; known are train, development, test"),
        ({"durations": ("short", "tall")}, "--durations tall: unknown"),
        ({"hardness": ("hard",)}, "--hardness hard: unknown; known are plain, dim"),
        ({"hardness": ()}, "--hardness must name at least one"),
        ({"n_videos": 0}, "--videos must be 1 to 10000"),
        ({"seed": -1}, "--seed must be 0 to 99"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        Recipe(**options)


def test_durations_and_hardness_take_turns_and_lengths_have_their_share():
    films = list(Recipe(n_videos=24, durations=("short", "long"), hardness=("plain", "dim", "pan")).videos())
    made = Counter((film.duration, film.video.n_frames, film.video.hardness.name) for film in films)
    assert set(made.values()) == {4} and len(made) == 6


@pytest.mark.parametrize("split", list(SEEDS))
def test_videos_are_of_the_split_that_was_named(split):
    films = list(Recipe(split=split, n_videos=3).videos())
    assert all(film.video.seed in SEEDS[split] for film in films)
    assert Recipe().split == "development"


def test_every_type_of_question_is_a_part_of_the_split(folder):
    assert {item.splits["task_type"] for item in SHAPES.load(folder).items} <= set(TYPES)
