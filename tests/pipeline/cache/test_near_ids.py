"""Likely ids for an id that a cache lacks: which come first, among few and many, and how often they are sought."""

import pickle

import pyarrow as pa
import pytest

from pipeline import TokenCache, TokenDataset, UnknownVideo
from pipeline.cache.header import read_fingerprint
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.near_ids import find_similar_ids, suggest_ids
from pipeline.cache.reader import MAX_HINTS
from pipeline.errors import describe_similar_name, make_printable, suggest_file, suggest_unicode_form
from tests.builders.answers import tiny_cache
from tests.pipeline.verifying import remove

IDS = ("a/bikes.mp4", "b/boats.mp4", "b/boat.mp4", "b/cats.webm", "c/cats.mp4", "c/kites.mp4", "c/kites.webm")
MANY = pa.chunked_array([[f"{n % 97:02}/{n * 7919 % 10**8:08}.mp4" for n in range(50_000)]])


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("bikes.mp4", ["a/bikes.mp4"]),
        ("/data/videos/bikes.mp4", ["a/bikes.mp4"]),  # the only base name, whatever stands before it
        ("bikes", ["a/bikes.mp4"]),  # without a suffix, or with another
        ("x/bikes.avi", ["a/bikes.mp4"]),
        ("b/boa", ["b/boats.mp4", "b/boat.mp4"]),  # ids that hold it
        ("cats", ["b/cats.webm", "c/cats.mp4"]),  # the base name of two ids says nothing
        ("boat", ["b/boat.mp4", "b/boats.mp4"]),  # the base name first
        ("a/bikse.mp4", ["a/bikes.mp4"]),
        ("A/bike.mp4", ["a/bikes.mp4"]),
        ("kites.mp4", ["c/kites.mp4"]),
        ("d/cafe\u0301 1.mp4", ["d/caf\u00e9\u202f1.mp4"]),  # another Unicode form, and a space of macOS
        ("d/\ud55c\uad6d.mp4", ["d/\u1112\u1161\u11ab\u1100\u116e\u11a8.mp4"]),
        (" a/bikes.mp4", ["a/bikes.mp4"]),
        ("a\\bikes.mp4", ["a/bikes.mp4"]),
        ("nothing of the kind", []),
        ("", []),
        ("\ud800", []),
    ],
)
def test_the_likeliest_comes_first(wrong, near):
    other = ["d/caf\u00e9\u202f1.mp4", "d/\u1112\u1161\u11ab\u1100\u116e\u11a8.mp4"]
    assert find_similar_ids(wrong, pa.chunked_array([IDS[:3], IDS[3:], other]))[: max(1, len(near))] == near


LIKE = "(it differs only by blanks, slashes or characters that look alike: "


@pytest.mark.parametrize(
    ("wrong", "near", "words"),
    [
        ("caf\u00e9.mp4", "cafe\u0301.mp4", r"(it differs only by its Unicode form, NFD: 'cafe\u0301.mp4')"),
        ("cafe\u0301.mp4", "caf\u00e9.mp4", r"(it differs only by its Unicode form, NFC: 'caf\xe9.mp4')"),
        ("a 1.mp4", "a\u202f1.mp4", rf"{LIKE}'a\u202f1.mp4')"),
        ("a.mp4 ", "a.mp4", f"{LIKE}'a.mp4')"),
        ("a.mp4", "b.mp4", ""),
    ],
)
def test_a_name_that_looks_the_same_is_described(tmp_path, wrong, near, words):
    """Otherwise a message says that there is no X, and asks for X."""
    assert describe_similar_name(wrong, near) == f"{near} {words}".strip()
    (tmp_path / near).touch()
    for hint in (suggest_ids(wrong, pa.chunked_array([[near]])), suggest_file(tmp_path / wrong)):
        assert make_printable(f"did you mean {near} {words}") in make_printable(hint)
    is_form = "Unicode form" in words
    assert ("its Unicode form" in suggest_unicode_form(str(tmp_path / wrong))) == is_form


@pytest.mark.parametrize(
    "wrong",
    ["05/0079190.mp4", "05/100079190.mp4", "05/00079109.mp4", "05/00079191.mp4", "0500079190.mp4", "00079190.avi"],
)
def test_a_letter_too_many_too_few_or_wrong_is_found_among_many(wrong):
    right = MANY[10].as_py()
    assert right == "10/00079190.mp4"
    assert right in find_similar_ids(wrong.replace("05", "10", 1), MANY)


@pytest.mark.parametrize("merged", [False, True])
def test_readers_name_the_likely_id_from_small_and_sorted_files(tmp_path, merged):
    store = tiny_cache(tmp_path / "c", IDS[:4], failed=IDS[4:])
    if merged:
        merge_table_fully(store, read_fingerprint(store))
    cache = TokenCache(tmp_path / "c")
    assert bool(LiveVideos.open(store).sorted) == merged == (len(LiveVideos.open(store).small) == 0)
    for read in (
        cache.get,
        cache.metadata,
        lambda video_id: cache.get_many([IDS[0], video_id]),
        lambda video_id: TokenDataset(cache, [video_id])[0],
        lambda video_id: cache.shards([video_id]),
    ):
        with pytest.raises(UnknownVideo, match=r"has 7 rows\); did you mean a/bikes\.mp4\?$") as error:
            read("bikes.mp4")
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # noqa: S301


def test_a_program_that_asks_for_many_reads_the_ids_for_the_first_alone(tmp_path):
    tiny_cache(tmp_path / "c", IDS[:2])
    cache, said = TokenCache(tmp_path / "c"), []
    for number in range(3 * MAX_HINTS):
        with pytest.raises(UnknownVideo) as caught:
            cache.get(f"{number}/bikes.mp4")
        said.append("did you mean" in str(caught.value))
    assert said == [True] * MAX_HINTS + [False] * 2 * MAX_HINTS


def test_a_removed_video_is_not_named(tmp_path):
    store = tiny_cache(tmp_path / "c", (IDS[0], "another"))
    remove(store, IDS[0])
    with pytest.raises(UnknownVideo, match=r"rows\)$"):
        TokenCache(tmp_path / "c").get("bikes.mp4")
