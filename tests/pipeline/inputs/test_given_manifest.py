"""Videos that a caller has at hand: paths, dicts and tables become the same rows as a manifest."""

from pathlib import Path

import polars
import pyarrow as pa
import pytest

from pipeline.errors import ManifestError
from pipeline.inputs.manifest import convert_given_videos
from tests.builders.manifests import read_manifest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_paths_are_called_by_their_names_and_may_be_anywhere_but_behind_a_link(tmp_path, here):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "other" / "a.mp4", "b.mp4", "s3://bucket/far/c.mp4"]
    given = convert_given_videos(paths).to_pylist()
    assert given == convert_given_videos(iter(paths)).to_pylist()
    assert [(row["video_id"], row["uri"], row["policy"]) for row in given] == [
        ("a.mp4", str(tmp_path / "other" / "a.mp4"), None),
        ("b.mp4", str(here / "b.mp4"), None),
        ("c.mp4", "s3://bucket/far/c.mp4", None),
    ]
    (tmp_path / "secret.mp4").write_text("x")
    (here / "a.mp4").symlink_to(tmp_path / "secret.mp4")
    assert "outside" in convert_given_videos(["a.mp4"])["policy"][0].as_py()
    assert convert_given_videos(["a.mp4"], [str(tmp_path)])["policy"][0].as_py() is None


def test_the_name_of_a_signed_address_is_without_its_secret():
    rows = convert_given_videos(
        ["https://host/a.mp4?sig=SEC", "s3://bucket/b.mp4?sig=SEC", "s3://bucket/c#1.mp4", "d?.mp4"]
    )
    assert rows["video_id"].to_pylist() == ["a.mp4", "b.mp4", "c#1.mp4", "d?.mp4"]
    assert [bool(policy) for policy in rows["policy"].to_pylist()] == [True, True, False, False]
    assert "SEC" not in str(rows)


def test_a_file_uri_holds_a_path_alone(here):
    (here / "a b.mp4").write_text("x")
    refused = ["file://[x/a.mp4", "file://key@host/a.mp4", f"file://{here}/a.mp4?key=1", f"file://{here}/a.mp4#1"]
    refused.append("file:///x%00/a.mp4")
    uris = [f"file://{here}/a%20b.mp4", f"file://localhost{here}/a%20b.mp4", *refused]
    rows = convert_given_videos(
        [{"video_id": str(number), "uri": uri} for number, uri in enumerate(uris)], [str(here)]
    ).to_pylist()
    assert [row["policy"] for row in rows[:2]] == [None, None] and rows[0]["uri"] == rows[1]["uri"] == f"{here}/a b.mp4"
    assert all("may hold a path only" in row["policy"] and "key" not in row["uri"] for row in rows[2:])


ROWS = [{"video_id": "a", "uri": "x.mp4", "start_s": 1.0, "topic": "cats"}, {"video_id": "b", "uri": "y.mp4"}]


def make_categories(rows):
    """The dictionaries of Polars hold views of text."""
    return polars.DataFrame(rows, schema_overrides={"video_id": polars.Categorical, "uri": polars.Categorical})


@pytest.mark.parametrize("kind", [list, tuple, iter, pa.Table.from_pylist, polars.DataFrame, make_categories])
def test_rows_are_those_of_a_manifest_in_the_current_folder(here, kind):
    (here / "m.jsonl").write_text(
        '{"video_id": "a", "uri": "x.mp4", "start_s": 1, "topic": "cats"}\n{"video_id": "b", "uri": "y.mp4"}'
    )
    assert convert_given_videos(kind(ROWS)).equals(read_manifest("m.jsonl"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the list is empty"),
        (["x/a.mp4", "y/a.mp4"], "2 paths end in 'a.mp4': give dicts with a video_id and a uri each"),
        ([{"video_id": "a"}], "videos, row 0: no uri"),
        (
            pa.table({"video_id": pa.DictionaryArray.from_arrays([1, 0], ["a", None]), "uri": ["a.mp4", "b.mp4"]}),
            "videos, row 0: no video_id",
        ),
        ([ROWS[0], "b.mp4"], "videos, row 1: expected a dict with video_id and uri, got str"),
        ([ROWS[0], ROWS[0]], "1 rows repeat a video_id"),
        (ROWS[0], "expected a list of dicts or a table with video_id and uri, got dict"),
        (pa.chunked_array([["a"]]), "expected a list of dicts or a table with video_id and uri, got ChunkedArray"),
        (7, "expected a list of dicts or a table with video_id and uri, got int"),
    ],
)
def test_what_is_no_list_of_videos_is_refused_by_name(given, said):
    with pytest.raises(ManifestError, match=said):
        convert_given_videos(given)
