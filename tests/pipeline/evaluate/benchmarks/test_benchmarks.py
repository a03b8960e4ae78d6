"""Benchmarks: every row of the annotations is a question or a fault, and no path leads out of the data folder."""

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.errors import QuestionsError, UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS, find_benchmark
from pipeline.evaluate.benchmarks.own import is_same_text
from pipeline.evaluate.protocols import LETTER
from tests.builders.manifests import read_manifest
from tests.pipeline.evaluate.videomme import LEFT_OUT, MISSING, OUTSIDE, video_id, write_rows, write_videomme

VIDEOMME = BENCHMARKS["videomme"]


@pytest.fixture
def data(tmp_path):
    return write_videomme(tmp_path / "videomme", videos=False)


def rows_of(folder):
    return pq.read_table(folder / "videomme" / "test-00000-of-00001.parquet").to_pylist()


def plain_rows(tmp_path, n_videos=2):
    """The rows of a VideoMME without faults, to put one in."""
    return rows_of(write_videomme(tmp_path / "v", n_videos=n_videos, faults=False, videos=False))


def reload(tmp_path, rows):
    write_rows(tmp_path / "v", rows)
    return VIDEOMME.load(tmp_path / "v")


def test_every_row_without_a_fault_is_a_question_that_says_what_its_row_says(tmp_path):
    rows = plain_rows(tmp_path, 6)
    loaded = VIDEOMME.load(tmp_path / "v")
    assert loaded.n_annotated == len(loaded.items) == 18 and not loaded.faults
    assert Counter(item.splits["duration"] for item in loaded.items) == {"short": 6, "medium": 6, "long": 6}
    assert [item.question_id for item in loaded.items] == [row["question_id"] for row in rows]
    for item, row in zip(loaded.items, rows, strict=True):
        assert (item.question, item.options, item.expected) == (row["question"], tuple(row["options"]), row["answer"])
        assert item.answer == "ABCD".index(row["answer"]) and (item.start_s, item.end_s) == (None, None)
    item = loaded.items[0]
    assert item.video_ids == ("data/-Ab0xYz_9Qk.mp4",) and item.video_id == item.video_ids[0]
    assert item.cluster == "-Ab0xYz_9Qk"
    assert item.splits == {
        "duration": "short", "domain": "Knowledge", "sub_category": "Geography", "task_type": "OCR Problems"
    }  # fmt: skip


def test_every_fault_is_listed_with_its_row_and_its_question_and_the_rows_add_up(data):
    loaded, rows = VIDEOMME.load(data), rows_of(data)
    assert loaded.n_annotated == len(rows) == len(loaded.items) + LEFT_OUT and len(loaded.items) == 18
    assert Counter(fault.kind for fault in loaded.faults)["missing-video"] == 3
    faults = {fault.kind: fault for fault in loaded.faults}
    expected = {
        "repeated-candidate": (1, False, "the option 'A cup.' is there 2 times"),
        "answer-no-candidate": (2, False, "the answer 'E' is none of the options"),
        "missing-video": (5, True, f"there is no 'data/{MISSING}.mp4' in the data folder"),
        "bad-row": (6, True, "options must be a list of texts, got None"),
        "policy": (7, True, f"{OUTSIDE!r} leads outside"),
    }
    assert faults.keys() == expected.keys() and len(loaded.faults) == 7
    for kind, (place, left_out, message) in expected.items():
        fault = faults[kind]
        assert (fault.question_id, fault.left_out) == (rows[place]["question_id"], left_out)
        assert f"videomme/test-00000-of-00001.parquet, row {place}: " in fault.message and message in fault.message


def test_videos_are_found_with_any_of_their_suffixes_under_the_ids_that_pruning_gives_them(tmp_path):
    write_videomme(tmp_path, n_videos=4, videos=False)
    found = list(dict.fromkeys(item.video_id for item in VIDEOMME.load(tmp_path).items))
    assert found == [video_id(number) for number in range(4)]
    assert {Path(name).suffix for name in found} == {".mp4", ".MP4", ".mkv"}
    assert sorted(found) == sorted(read_manifest(str(tmp_path))["video_id"].to_pylist())


@pytest.mark.parametrize("videos", ["video", "."])
def test_other_layouts_are_found_too(tmp_path, videos):
    write_videomme(tmp_path, n_videos=1, faults=False, videos=False)
    (tmp_path / "videomme" / "test-00000-of-00001.parquet").rename(tmp_path / "test-00000-of-00001.parquet")
    (tmp_path / videos).mkdir(exist_ok=True)
    (tmp_path / video_id(0)).rename(tmp_path / videos / Path(video_id(0)).name)
    items = VIDEOMME.load(tmp_path).items
    assert items[0].video_id == str(Path(videos) / "-Ab0xYz_9Qk.mp4") and len(items) == 3


def test_all_parts_of_the_annotations_are_read(tmp_path):
    first, *others = plain_rows(tmp_path)
    path = write_rows(tmp_path / "v", others)
    path.rename(path.with_name("test-00001-of-00002.parquet"))
    loaded = reload(tmp_path, [first])
    assert [item.question_id for item in loaded.items] == [row["question_id"] for row in (first, *others)]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ({"question_id": None}, "question_id must be text"),
        ({"options": ["A. x", None]}, "options must be a list of texts"),
        ({"options": [f"option {i}" for i in range(27)]}, "there are 26 letters"),
        ({"duration": "tiny"}, "duration must be one of short, medium, long, got 'tiny'"),
        *(({"videoID": key}, "") for key in ("../../outside", "/etc/passwd", "x\0y")),  # none leads out of the folder
    ],
)
def test_a_bad_cell_costs_its_row_alone(tmp_path, cell, said):
    (tmp_path / "outside.mp4").touch()
    rows = plain_rows(tmp_path)
    (fault,) = (loaded := reload(tmp_path, [rows[0], rows[1] | cell, *rows[2:]])).faults
    assert fault.kind == ("policy" if cell.get("videoID") else "bad-row") and said in fault.message
    assert fault.question_id == (None if "question_id" in cell else "001-2") and fault.message.isprintable()
    assert len(loaded.items) == len(rows) - 1


def test_an_id_counts_once_and_a_question_under_two_ids_is_kept_and_listed(tmp_path):
    rows = plain_rows(tmp_path)
    more = [rows[0] | {"question": "Another?"}, rows[0] | {"question_id": "x"}]
    loaded = reload(tmp_path, [*rows, *more, rows[3] | {"question_id": "y", "question": "Q"}])
    assert [(fault.kind, fault.question_id, fault.left_out) for fault in loaded.faults] == [
        ("repeated-question", "001-1", True), ("repeated-question", "x", False)
    ]  # fmt: skip
    assert "'001-1'" in loaded.faults[1].message
    assert (
        len(loaded.items) == len(rows) + 2 == loaded.n_annotated - 1 and loaded.items[0].question == rows[0]["question"]
    )


@pytest.mark.parametrize(("answer", "index"), [(" b ", 1), ("A.", None), ("1", None), ("E", None)])
def test_the_answer_is_a_letter_of_either_case_or_no_candidate(tmp_path, answer, index):
    loaded = reload(tmp_path, [plain_rows(tmp_path)[0] | {"answer": answer}])
    assert (loaded.items[0].answer, loaded.items[0].expected) == (index, answer)
    assert [fault.kind for fault in loaded.faults] == ([] if index else ["answer-no-candidate"])


def test_a_video_whose_name_is_there_in_another_unicode_form_is_named(tmp_path):
    rows = plain_rows(tmp_path)
    (tmp_path / "v/data/cafe\u0301.mp4").touch()
    (fault,) = reload(tmp_path, [rows[0], rows[1] | {"videoID": "caf\u00e9"}]).faults
    assert fault.kind == "missing-video" and "its Unicode form, NFD:" in fault.message


def test_no_link_leads_out_of_the_data_folder(tmp_path):
    rows, data = plain_rows(tmp_path), tmp_path / "v"
    (tmp_path / "elsewhere").mkdir()
    for name in ("secret.mp4", "elsewhere/other.mp4"):
        (tmp_path / name).touch()
    (data / "data" / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (data / "videos").symlink_to(tmp_path / "elsewhere")
    (data / "data" / "within.mp4").symlink_to(data / video_id(0))
    keys = ["link", "other", "within"]
    loaded = reload(tmp_path, [row | {"videoID": key} for row, key in zip(rows, keys, strict=False)])
    assert [fault.kind for fault in loaded.faults] == ["policy", "policy"]
    assert "'data/link.mp4'" in loaded.faults[0].message and "'videos/other.mp4'" in loaded.faults[1].message
    assert [item.video_id for item in loaded.items] == ["data/within.mp4"]
    other_disk = VIDEOMME.load(data, [tmp_path])  # --video-root
    assert not other_disk.faults and len(other_disk.items) == 3


def test_a_folder_or_annotations_that_are_none_are_refused_with_the_remedy(tmp_path, data):
    (tmp_path / "file").touch()
    for place, said in (
        (tmp_path / "none", "no such folder; the folder must hold the data set lmms-eval/Video-MME"),
        (tmp_path / "file", "is a file; name the folder"),
        (Path("s3://bucket/videomme"), "only local folders are read"),
        (None, "--data must name the folder of VideoMME"),
        (tmp_path, r"looked for videomme/test-\*.parquet, test-\*.parquet\); the folder must hold the data set"),
    ):
        with pytest.raises(UsageError, match=said) as error:
            VIDEOMME.load(place)
        assert place is None or str(place) in str(error.value)
    path = data / "videomme" / "test-00000-of-00001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["options", "videoID"]), path)
    with pytest.raises(UsageError, match=r"needs the columns options, videoID, and this file has only video_id, dur"):
        VIDEOMME.load(data)
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(UsageError, match="there is no question in it"):
        VIDEOMME.load(data)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match=r"test-00000-of-00001.parquet: cannot be read: .*; fetch it again"):
        VIDEOMME.load(data)


def test_where_no_question_is_left_it_is_said_why(tmp_path):
    rows = plain_rows(tmp_path)
    for path in (tmp_path / "v" / "data").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match=r"none of the 7 .* \(6 missing-video, 1 policy\), e.g. .*Ab0xYz.*unpacked"):
        reload(tmp_path, [*rows, rows[0] | {"videoID": "../x"}])


def test_benchmarks_are_found_by_name_and_questions_by_their_file(tmp_path):
    assert find_benchmark("videomme") is VIDEOMME
    own = find_benchmark(str(tmp_path / "mine.csv"))
    assert (own.name, own.title, own.protocols) == ("mine.csv", "mine", (LETTER,))
    why = r"vidoemme: unknown \(did you mean videomme\?\); known are videomme, .*, lmms:TASK .*and a file of"
    with pytest.raises(UsageError, match=why):
        find_benchmark("vidoemme")


def own(tmp_path, rows, data=None):
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return find_benchmark(str(path)).load(data)


OWN = [
    {"question_id": 7, "video_id": "a.mp4", "prompt": "What?", "choices": ["a dog", "a cat"], "answer": "a cat"},
    {"question_id": "8", "video_id": ["a.mp4", "-b.mp4"], "prompt": "Which?", "choices": ["x", "y"], "answer": "A",
     "split": "hard", "cluster": "both", "note": "not looked at"},
    {"question_id": "9", "video_id": "-b.mp4", "prompt": "How many?", "answer": "Three dogs."},
]  # fmt: skip


def test_videos_that_a_question_ties_together_are_one_cluster_unless_the_file_says_otherwise(tmp_path):
    asked = [["a"], ["b", "c"], ["c", "d"], ["e"], ["d"], ["b"]]
    rows = [OWN[2] | {"question_id": i, "video_id": ids, "prompt": f"{i}?"} for i, ids in enumerate(asked)]
    clusters = [item.cluster for item in own(tmp_path, rows).items]
    assert clusters == ["a", "b", "b", "e", "b", "b"]
    assert [item.cluster for item in own(tmp_path, OWN).items] == ["-b.mp4", "both", "-b.mp4"]


@pytest.mark.parametrize(
    ("choices", "answer", "index"),
    [
        (["a dog", "a cat"], " A Cat ", 1),
        (["cat", "Cat"], "Cat", 1),  # exact before folded
        (["B", "A"], "A", 1),  # a text before a letter
        (["x", "y"], "b", 1),
        (["2", "1", "0"], 0, 2),  # a text before an index
        (["x", "y", "z"], "0", 0),
        (["A. x", "B. y"], "y", 1),
        (["(A) 2", "(B) 3", "(C) 1"], "1", 2),  # a text before an index here, too
        (["A. B", "B. A"], "A", 0),
        (["x", "y"], "B. y", 1),
        (["x", "y"], "B. x", None),
        (["x", "y"], 2, None),
        (["x", "y"], "C", None),
    ],
)
def test_the_right_choice_is_named_by_text_then_letter_then_index(tmp_path, choices, answer, index):
    loaded = own(tmp_path, [OWN[0] | {"choices": choices, "answer": answer}])
    assert loaded.items[0].answer == index and loaded.items[0].expected == str(answer)
    assert [fault.kind for fault in loaded.faults] == ([] if index is not None else ["answer-no-candidate"])


@pytest.mark.parametrize(
    ("answers", "is_from_1"),
    [
        ([1, 2, 3], True),
        ([1, 2, 3, "b"], True),  # beside a letter
        ([0, 1, 2], False),
        ([1, 2, 2], False),  # nothing shows
        (["a", "b", "a", 3], False),  # one wrong answer among letters
    ],
)
def test_answers_that_are_counted_from_1_are_refused(tmp_path, answers, is_from_1):
    rows = [OWN[0] | {"question_id": i, "choices": ["x", "y", "z"], "answer": a} for i, a in enumerate(answers)]
    why = r"own\.jsonl: of 3 right answers .* 1 are the number of choices"
    with pytest.raises(UsageError, match=why) if is_from_1 else nullcontext():
        assert own(tmp_path, rows).items


def test_the_number_of_choices_is_each_questions_own_and_a_number_may_be_a_choice(tmp_path):
    few, many, numbers = ({"choices": choices} for choices in (["x", "y"], ["x", "y", "z"], ["1", "2"]))
    kinds = [(many, 2), (few, 1), (numbers, 2), ({"choices": ["A. 1", "B. 2"]}, "2")]
    rows = [OWN[0] | kind | {"question_id": i, "answer": answer} for i, (kind, answer) in enumerate(kinds)]
    assert [item.answer for item in own(tmp_path, rows).items] == [2, 1, 1, 1]
    with pytest.raises(UsageError, match=r"of 3 right answers that are numbers, 1 are the number of choices"):
        own(tmp_path, [*rows, rows[0] | {"question_id": "x", **few}])


@pytest.mark.parametrize(
    ("reply", "expected", "same"),
    [
        ("three  dogs", "Three dogs.", True),
        (" «Three dogs»! ", "three dogs", True),
        ("three cats", "three dogs", False),
        ("", "?!", False),
        ("don't know", "dont know", True),
        ("15", "1.5", False),
        ("It is -5.", "it is: -5", True),
        ("3", "3.0", True),  # as pandas writes whole numbers of a column with gaps
        ("1000", "1,000", True),
        ("12", "1/2", False),
        ("It is 10:30.", "it is 10:30", True),
    ],
)
def test_a_free_answer_is_right_but_for_case_spaces_and_punctuation(reply, expected, same):
    assert is_same_text(reply, expected) is same


def test_own_videos_are_looked_for_below_the_data_folder_and_nowhere_else(tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "sub" / "a.mp4").touch()
    (tmp_path / "out.mp4").touch()
    ids = ["sub/a.mp4", "./sub//a.mp4", "gone.mp4", "../out.mp4", ["sub/a.mp4", "gone.mp4"], str(data / "sub/a.mp4")]
    rows = [OWN[0] | {"question_id": i, "video_id": video, "prompt": f"{i}?"} for i, video in enumerate(ids)]
    loaded = own(tmp_path, rows, data)
    assert [item.video_ids for item in loaded.items] == [("sub/a.mp4",), ("sub/a.mp4",)]
    assert [fault.kind for fault in loaded.faults] == ["missing-video", "policy", "missing-video", "policy"]
    assert loaded.n_annotated == 6 == len(loaded.items) + sum(fault.left_out for fault in loaded.faults)
    assert len(own(tmp_path, rows).items) == 6  # of a cache: ids are not paths
    with pytest.raises(UsageError, match=r"none of the 1 .*every question needs its videos below --data"):
        own(tmp_path, rows[2:3], data)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": None}, "question 8: answer is missing: a choice, its letter or its index"),
        ({"split": ["x"]}, "question 8: split must be text"),
        ({"cluster": True}, "question 8: cluster must be text"),
        ({"system": "Be brief."}, "question 8: system, max_new_tokens, temperature, top_p, top_k and seed are for"),
    ],
)
def test_what_is_wrong_with_a_row_of_ones_own_is_said_with_its_place(tmp_path, row, said):
    with pytest.raises(QuestionsError) as error:
        own(tmp_path, [OWN[0], OWN[1] | row])
    assert f"{tmp_path / 'own.jsonl'}, {said}" in str(error.value)
