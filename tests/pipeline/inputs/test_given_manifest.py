"""Videos that a caller has at hand become rows of a manifest; what a cache names is read below named places alone."""

import contextlib
import io
import json
import tarfile
from pathlib import Path

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ManifestError, VideoFault
from pipeline.inputs.forms import make_member_fetcher
from pipeline.inputs.manifest import convert_given_videos, sort_roots
from pipeline.inputs.named_videos import MANIFEST_SCHEMA, ManifestConverter, Roots
from pipeline.inputs.tables import read_row_batches
from pipeline.inspect.page import render_video_page
from pipeline.storage.s3 import Objects
from tests.builders.manifests import read_manifest
from tests.builders.stores import S3Server
from tests.pipeline.pages import FRAMES, VIDEO, build, decoded_clip, pictures_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_paths_are_called_by_their_names_and_may_be_anywhere_but_behind_a_link(tmp_path, here):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "other" / "a.mp4", "b.mp4", "s3://bucket/far/c.mp4"]
    found = convert_given_videos(paths).to_pylist()
    assert found == convert_given_videos(iter(paths)).to_pylist()
    assert [(row["video_id"], row["uri"], row["policy"]) for row in found] == [
        ("a.mp4", str(tmp_path / "other" / "a.mp4"), None),
        ("b.mp4", str(here / "b.mp4"), None),
        ("c.mp4", "s3://bucket/far/c.mp4", None),
    ]
    (tmp_path / "secret.mp4").write_text("x")
    (here / "a.mp4").symlink_to(tmp_path / "secret.mp4")
    assert "outside" in convert_given_videos(["a.mp4"])["policy"][0].as_py()
    assert convert_given_videos(["a.mp4"], [str(tmp_path)])["policy"][0].as_py() is None


def test_the_name_of_a_signed_address_is_without_its_secret():
    uris = ["https://host/a.mp4?sig=SEC", "s3://bucket/b.mp4?sig=SEC", "s3://bucket/c#1.mp4", "d?.mp4"]
    rows = convert_given_videos(uris)
    assert rows["video_id"].to_pylist() == ["a.mp4", "b.mp4", "c#1.mp4", "d?.mp4"]
    assert [bool(policy) for policy in rows["policy"].to_pylist()] == [True, True, False, False]
    assert "SEC" not in str(rows)


def test_a_file_uri_holds_a_path_alone(here):
    (here / "a b.mp4").write_text("x")
    refused = ["file://[x/a.mp4", "file://key@host/a.mp4", f"file://{here}/a.mp4?key=1", f"file://{here}/a.mp4#1"]
    refused.append("file:///x%00/a.mp4")
    uris = [f"file://{here}/a%20b.mp4", f"file://localhost{here}/a%20b.mp4", *refused]
    named = [{"video_id": str(number), "uri": uri} for number, uri in enumerate(uris)]
    rows = convert_given_videos(named, [str(here)]).to_pylist()
    assert [row["policy"] for row in rows[:2]] == [None, None] and rows[0]["uri"] == rows[1]["uri"] == f"{here}/a b.mp4"
    assert all("may hold a path only" in row["policy"] and "key" not in row["uri"] for row in rows[2:])


ROWS = [{"video_id": "a", "uri": "x.mp4", "start_s": 1.0, "topic": "cats"}, {"video_id": "b", "uri": "y.mp4"}]


NULL_WORD = pa.DictionaryArray.from_arrays([1, 0], ["a", None])
NO_LISTS = (ROWS[0], pa.chunked_array([["a"]]), 7)


def make_categories(rows):
    """The dictionaries of Polars hold views of text."""
    return polars.DataFrame(rows, schema_overrides={"video_id": polars.Categorical, "uri": polars.Categorical})


@pytest.mark.parametrize("kind", [list, tuple, iter, pa.Table.from_pylist, polars.DataFrame, make_categories])
def test_rows_are_those_of_a_manifest_in_the_current_folder(here, kind):
    (here / "m.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert convert_given_videos(kind(ROWS)).equals(read_manifest("m.jsonl"))


@pytest.mark.parametrize(
    ("videos", "said"),
    [
        ([], "the list is empty"),
        (["x/a.mp4", "y/a.mp4"], "2 paths end in 'a.mp4': give dicts with a video_id and a uri each"),
        ([{"video_id": "a"}], "videos, row 0: no uri"),
        (pa.table({"video_id": NULL_WORD, "uri": ["a.mp4", "b.mp4"]}), "videos, row 0: no video_id"),
        ([ROWS[0], "b.mp4"], "videos, row 1: expected a dict with video_id and uri, got str"),
        ([ROWS[0], ROWS[0]], "1 rows repeat a video_id"),
        *((one, f"a list of dicts or a table .*, got {type(one).__name__}") for one in NO_LISTS),
    ],
)
def test_what_is_no_list_of_videos_is_refused_by_name(videos, said):
    with pytest.raises(ManifestError, match=said):
        convert_given_videos(videos)


NAMES = st.text(st.sampled_from("ab./ \u3000\n:?é7"), max_size=8) | st.sampled_from(
    ["a/b.mp4", "/m/a.mp4", "/else/a.mp4", "s3://bucket/p/a.mp4", "s3://bucket/q/a.mp4", "s3://bucket/p/../a", "../a"]
)
OPTIONAL = {
    "end_s": st.sampled_from([None, 0, 1.5, "2.5", "", "soon", float("nan"), 10**400, True]),
    "size_bytes": st.sampled_from([None, 0, 5, 5.0, "7", "", -1, 2.5, "much", float("nan"), 2**60, 10**400, True]),
    "x": NAMES,
}


@pytest.mark.parametrize("base", [Path("/m"), "s3://bucket/p/"])
@settings(max_examples=40)
@given(rows=st.lists(st.fixed_dictionaries({"video_id": NAMES, "uri": NAMES}, optional=OPTIONAL)))
def test_rows_that_are_checked_together_are_what_each_is_alone(base, rows):
    roots = Roots([], ["s3://bucket/p/"])
    named = ManifestConverter("m", base, roots)
    parts = [read_row_batches("m.jsonl", io.BytesIO("\n".join(map(json.dumps, rows)).encode()), "")]
    with contextlib.suppress(pa.ArrowException, OverflowError):  # columns of many types, which Parquet does not take
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        parts.append(read_row_batches("m.parquet", pa.BufferReader(sink.getvalue()), ""))
    for part in (one for read in parts for one in read):
        plain = named._convert_by_columns(part)
        if plain is not None:
            plain.validate(full=True)
            one_by_one = [named._convert_row(row, where) for where, row in part]
            assert plain.to_pylist() == pa.RecordBatch.from_pylist(one_by_one, schema=MANIFEST_SCHEMA).to_pylist()


def test_an_empty_column_of_numbers_needs_no_look_at_each_row():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"video_id": ["a"], "uri": ["/m/a.mp4"], "start_s": pa.nulls(1, pa.float64())}), sink)
    [part] = read_row_batches("m.parquet", pa.BufferReader(sink.getvalue()), "")
    plain = ManifestConverter("m", Path("/m"), Roots([], []))._convert_by_columns(part)
    assert plain is not None and plain["start_s"].to_pylist() == [None]


@pytest.fixture
def places(tmp_path):
    """Files inside of the folder ``in`` and outside, links between them, and tars."""
    for name in ("in/sub/a.mp4", "in/a#1.mp4", "in2/a.mp4", "out/a.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "in" / "link.mp4").symlink_to(tmp_path / "out" / "a.mp4")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for name in ("in/a.tar", "out/a.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            tar.add(tmp_path / "out" / "a.mp4", "a.mp4")
    return tmp_path


ROOTS = ("in", "s3://bucket/videos", "hf://datasets/me/clips")
INSIDE = ["in/sub/a.mp4", "in/a#1.mp4", "link/sub/a.mp4", "in/a.tar#a.mp4", "s3://bucket/videos/a.mp4"]
INSIDE += ["s3://bucket/videos/a.tar#b.mp4", "hf://datasets/me/clips/a.mp4"]
OUTSIDE = ["out/a.mp4", "in2/a.mp4", "in/link.mp4", "in/folder/a.mp4", "in/../out/a.mp4", "out/a.tar#in/a.mp4"]
OUTSIDE += ["in/folder/a.tar#a.mp4", "in/a\0.mp4", "s3://bucket/videos2/a.mp4", "s3://bucket/videos/../a.mp4"]
OUTSIDE += ["s3://other/videos/a.mp4", "s3://bucket/a.tar#s3://bucket/videos/a", "hf://datasets/me/clips2/a.mp4"]
ELSEWHERE = ["a.mp4", "", "http://169.254.169.254/latest", "file:///in/a.mp4", "s3://k:SECRET@bucket/videos/a.mp4"]


def ask(places, uri, roots):
    offset = 512 if ".tar#" in uri else None
    row = {"uri": uri, "source_offset": offset, "source_size": 1, "source_mark": None}
    return make_member_fetcher(row, Objects(), sort_roots([r if "://" in r else str(places / r) for r in roots]))


def place_of(places, name):
    return name if "://" in name else str(places / name)


@pytest.mark.parametrize("name", INSIDE)
def test_a_source_below_a_root_is_read(places, name):
    fetch = ask(places, place_of(places, name), ROOTS)
    assert (fetch is not None) == (".tar#" in name)
    with pytest.raises(VideoFault, match=r"^policy: "):
        ask(places, place_of(places, name), ())


@pytest.mark.parametrize("name", [*OUTSIDE, *ELSEWHERE])
def test_a_source_elsewhere_is_not_read_whatever_it_is_called(places, monkeypatch, name):
    monkeypatch.chdir(places / "in")  # which is no place that was named
    uri = name if name in ELSEWHERE else place_of(places, name)
    with pytest.raises(
        VideoFault, match="read only below folders and prefixes that you name: for this one --vi"
    ) as error:
        ask(places, uri, ROOTS)
    assert "SECRET" not in str(error.value)


def test_roots_that_are_none_are_refused(tmp_path, monkeypatch):
    for root in (str(tmp_path / "gone"), "s3://bucket/../a", "hf://datasets/../a"):
        with pytest.raises(ManifestError, match="--video-root"):
            sort_roots([root])
    monkeypatch.chdir(tmp_path)
    assert sort_roots(["sample"]).folders[0].name == "data"
    (tmp_path / "sample").mkdir()
    assert sort_roots(["sample"]).folders[0].samefile(tmp_path / "sample")


def test_a_page_sends_no_request_that_its_reader_did_not_allow(tmp_path, monkeypatch):
    path, video = decoded_clip(tmp_path)
    with S3Server("roots") as server:
        server.reach(monkeypatch)
        uri = server.upload("all/bikes.mp4", path.read_bytes())
        cache = build(tmp_path / "c", (path, video), uri=uri)
        for roots in ([], ["/"], [server.uri("al")], [server.uri("all/bikes")]):
            page = render_video_page(cache, VIDEO, video_roots=roots)
            assert page.missing.endswith(f"for this one --video-root {server.uri('all')}") and not server.requests
        for root in (server.uri("all"), server.uri()):
            assert len(pictures_of(render_video_page(cache, VIDEO, video_roots=[root]).html)) == FRAMES
        assert server.counts() == {"GET": 2}
