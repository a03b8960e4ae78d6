"""Documents as the published tasks have them -> ids of a cache; no file is looked for, and lmms-eval is not needed."""

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.lmms.questions import CachedIds, video_key


@pytest.mark.parametrize(
    ("doc", "key"),
    [
        ({"video_id": "007", "videoID": "-Ab3xYz_9Qk", "question_id": "007-2"}, "-Ab3xYz_9Qk"),
        ({"video_id": "@cook-712", "id": "@cook-712_0", "video_path": "712.mp4"}, "712.mp4"),
        ({"video_name": "needle_3.mp4", "task_type": "needle"}, "needle_3.mp4"),
        ({"question_idx": "3", "video_idx": "0aa1-uuid"}, "0aa1-uuid"),
        ({"video": "v.mp4", "question": "?"}, "clevrer/video_validation/v.mp4"),
    ],
    ids=["VideoMME", "LongVideoBench", "MLVU", "EgoSchema", "MVBench"],
)
def test_what_a_document_calls_its_video(doc, key):
    assert video_key(doc, folder="clevrer/video_validation" if "video" in doc else None) == key


def test_other_tasks_say_how():
    assert video_key({"clip": "x", "set": "a"}, "{set}/{clip}.mp4") == "a/x.mp4"
    assert video_key({"videoID": "x", "part": 3}, "{videoID}-{part}") == "x-3"
    with pytest.raises(UsageError, match=r"video_id=\{vid\} .*it has clip"):
        video_key({"clip": "x"}, "{vid}")
    with pytest.raises(UsageError, match=r"no field names a video .* it has clip, n\): say how with video_id=TEMPLATE"):
        video_key({"clip": "x", "n": 1})
    with pytest.raises(UsageError, match="no field"):
        video_key({"video": None, "videoID": ""})


@pytest.mark.parametrize(
    ("ids", "key", "found"),
    [
        (["data/-Ab.mp4", "data/b.mkv"], "-Ab", "data/-Ab.mp4"),
        (["b.MP4"], "b", "b.MP4"),
        (["-Ab"], "-Ab", "-Ab"),
        (["videos/712.mp4", "videos/1712.mp4"], "712.mp4", "videos/712.mp4"),
        (["a/v.1.mp4"], "v.1", "a/v.1.mp4"),
        (["MLVU/video/2_needle/needle_3.mp4"], "needle_3.mp4", "MLVU/video/2_needle/needle_3.mp4"),
        (["video/data0613/star/Cut/x.mp4"], "star/Cut/x.mp4", "video/data0613/star/Cut/x.mp4"),
        (["a/v.mp4", "v.mp4"], "v.mp4", "v.mp4"),  # the one that is so to the letter
        (["v.mp4"], "clevrer/video_validation/v.mp4", None),  # of which folder, nobody knows
        (["x/1712.mp4"], "712.mp4", None),
        (["v.mkv"], "v.mp4", None),
        (["v.jpg"], "v", None),
        ([], "v", None),
    ],
)
def test_an_id_is_or_ends_with_what_the_document_says(ids, key, found):
    assert CachedIds(ids, {}).find(key) == found


def test_several_are_refused_and_one_that_failed_is_told():
    with pytest.raises(UsageError, match=r"'v' may be 'a/v.mp4' or 'b/v.mp4': say which with video_id=TEMPLATE"):
        CachedIds(["a/v.mp4", "b/v.mp4"], {}).find("v")
    ids = CachedIds(["a/v.mp4"], {"b/v.mp4": "corrupt", "c/w.mp4": "timeout"})
    assert (ids.find("v"), ids.find("w.mp4"), ids.failed["c/w.mp4"]) == ("a/v.mp4", "c/w.mp4", "timeout")
