"""Two caches, or two folders of answers, side by side: every way in which an item can differ."""

import pytest

from pipeline.errors import NotACache, VideoFault
from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.sharing.diff import compare
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import write_header
from tests.pipeline.sharing.test_merge import cache_of

FAULT = VideoFault("corrupt", "cut off")


def test_a_cache_that_was_made_again_by_other_runs_is_equal(tmp_path):
    videos = {"a": 1, "b": 2, "bad": FAULT}
    found = compare(cache_of(tmp_path / "a", videos, "x"), cache_of(tmp_path / "b", videos, "y", attempts=3))
    assert found.equal and found.n_equal == 3


def test_each_way_of_differing_is_told(tmp_path):
    first = cache_of(tmp_path / "a", {"same": 1, "tokens": 2, "status": 3, "class": FAULT, "left": 4})
    other = VideoFault("timeout", "too slow")
    second = cache_of(tmp_path / "b", {"same": 1, "tokens": 9, "status": FAULT, "class": other, "r1": 5, "r2": 6})
    found = compare(first, second)
    assert not found.equal and found.n_equal == 1 and found.identity == []
    assert [(words, way.count, way.examples) for words, way in found.ways()] == [
        ("only in the first", 1, ["left"]),
        ("only in the second", 2, ["r1", "r2"]),
        ("another status", 2, ["class", "status"]),
        ("other tokens", 1, ["tokens"]),
        ("other columns", 0, []),
    ]


def test_columns_that_differ_are_named(tmp_path):
    first = cache_of(tmp_path / "a", {"a": 1, "b": 2}, manifest='{"x": 1}')
    second = cache_of(tmp_path / "b", {"a": 1, "b": 2}, uri="elsewhere")
    found = compare(first, second)
    assert found.rows.count == 2 and found.columns == {"uri": 2, "manifest": 2} and found.content.count == 0


def test_other_settings_are_a_difference(tmp_path):
    found = compare(cache_of(tmp_path / "a", {}), cache_of(tmp_path / "b", {}))
    assert found.equal
    found = compare(LocalStore(tmp_path / "a"), write_header(tmp_path / "c", method="random", hidden_size=8))
    assert found.identity == ["pruner.method: the first has 'gstep', the second 'random'"] and not found.equal


def test_what_is_nothing_of_the_kind_is_refused(tmp_path):
    cache = cache_of(tmp_path / "a", {"a": 1})
    with pytest.raises(NotACache, match="neither a pruned-token cache nor a folder of answers"):
        compare(cache, LocalStore(tmp_path / "none"))


def answers_of(folder, answers):
    """A folder of answers, each question with its answer; None for one that failed."""
    store = LocalStore(folder)
    write_answers_header(store, {"retention_ratio": 0.1})
    common = {"video_ids": ["v"], "prompt": "What?", "attempts": 1}
    rows = [
        {**common, "question_id": name, "status": "ok", "answer": text}
        if text
        else {**common, "question_id": name, "status": "failed", "error_class": "crash", "error_message": "gone"}
        for name, text in answers.items()
    ]
    commit_answers(store, "run", 0, rows)
    return store


def test_answers_are_compared_by_question(tmp_path):
    first = answers_of(tmp_path / "a", {"same": "yes", "other": "no", "failed": None})
    second = answers_of(tmp_path / "b", {"same": "yes", "other": "yes", "failed": "so", "new": "yes"})
    found = compare(first, second)
    assert (found.item, found.n_equal) == ("question", 1) and compare(first, first).equal
    assert {words: way.examples for words, way in found.ways() if way.count} == {
        "only in the second": ["new"],
        "another status": ["failed"],
        "other answers": ["other"],
    }
    with pytest.raises(NotACache, match="two of one kind"):
        compare(first, cache_of(tmp_path / "c", {"a": 1}))
