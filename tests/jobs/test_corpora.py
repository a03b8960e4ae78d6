"""The same videos as files, in tars, zips and columns, here and on S3: equal tokens, the same resume, the same rows."""

import json
import shutil
import threading
import zipfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipeline
from jobs import inspect, prune, remove, verify
from pipeline import TokenCache
from pipeline.inputs.forms import FORMS
from pipeline.inputs.tar_and_zip import Tar
from tests.builders.archives import member, write_tar
from tests.builders.runs import assert_complete, clips, forbid_ray, said_by
from tests.builders.stores import S3Server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

OPTIONS = ["--num-frames", "2", "--max-failed", "9"]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {clip.name: clip.read_bytes() for clip in clips()}


@pytest.fixture(scope="module")
def few(files) -> dict[str, bytes]:
    return {name: files[name] for name in ("bikes.mp4", "carphone_distorted.mp4")}


def packed(folder: Path, *tars: dict[str, bytes]) -> list[str]:
    """Write the tars 0.tar, ... into the new folder tars/; return the arguments that prune them into cache/."""
    (folder / "tars").mkdir()
    for number, members in enumerate(tars):
        write_tar(folder / "tars" / f"{number}.tar", members)
    return [str(folder / "tars"), "--out", str(folder / "cache"), *OPTIONS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, few) -> Path:
    """A folder with two clips in every form."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "files").mkdir()
    for name, data in few.items():
        (root / "files" / name).write_bytes(data)
    notes = {f"{name.partition('.')[0]}.json": json.dumps({"says": name}).encode() for name in few}
    write_tar(root / "a.tar", dict(sorted({**few, **notes}.items())))
    with zipfile.ZipFile(root / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in few.items():
            archive.writestr(name, data)
    films = [{"bytes": data, "path": name} for name, data in few.items()]
    table = pa.table({"film": films, "video_id": list(few), "says": list(few)})
    pq.write_table(table, root / "a.parquet", row_group_size=1)
    return root


def tokens(cache: Path) -> dict[str, tuple[str, str]]:
    """Name of a clip -> what was read of it, and a checksum of its tokens."""
    opened = TokenCache(cache)
    rows = {video_id.rpartition("/")[2]: opened.metadata(video_id) for video_id in opened.video_ids}
    return {name: (row["source_hash"], row["checksum"]) for name, row in rows.items()}


@pytest.fixture(scope="module")
def tokens_of_files(one_ray, corpus, tmp_path_factory) -> dict[str, tuple[str, str]]:
    """The tokens of the clips as files of a folder, which every other form must give too."""
    cache = tmp_path_factory.mktemp("caches") / "files"
    said_by(prune, corpus / "files", "--out", cache, *OPTIONS)
    assert len(tokens(cache)) == 2
    return tokens(cache)


def test_every_form_gives_equal_tokens(one_ray, corpus, tokens_of_files, tmp_path, monkeypatch):
    forms = {"a.tar": [], "a.zip": [], "a.parquet": ["--column", "film"]}
    for form, more in forms.items():
        said_by(prune, corpus / form, *more, "--out", tmp_path / form, *OPTIONS)
        assert tokens(tmp_path / form) == tokens_of_files
    lists = [corpus / "a.tar", str(corpus / "a.zip")]
    told = pipeline.prune_videos(lists, out=tmp_path / "both", num_frames=2, progress=False)
    assert told.n_ok == 4 and tokens(tmp_path / "both") == tokens_of_files
    tar = TokenCache(tmp_path / "a.tar")
    row = tar.metadata("a.tar/bikes.mp4")
    assert row["manifest"] == {"json": {"says": "bikes.mp4"}}
    assert (row["source_shard"], row["uri"]) == (str(corpus / "a.tar"), f"{corpus / 'a.tar'}#bikes.mp4")
    data = (corpus / "a.tar").read_bytes()
    assert data[row["source_offset"] :].startswith((corpus / "files" / "bikes.mp4").read_bytes())
    assert TokenCache(tmp_path / "a.parquet").metadata("bikes.mp4")["manifest"] == {"says": "bikes.mp4"}
    assert verify.main([str(tmp_path / "a.tar"), "--live", "4", "--video-root", "/"]) == 0
    for form in forms:  # nothing else in a cache minds where its videos lie
        video_id = TokenCache(tmp_path / form).video_ids[0]
        shown = said_by(inspect, tmp_path / form, video_id, "--html", tmp_path / "page.html", "--video-root", "/")
        assert "with pictures" in shown
    forbid_ray(monkeypatch)
    for form, more in forms.items():
        again = said_by(prune, corpus / form, *more, "--out", tmp_path / form, *OPTIONS)
        assert "2 of 2 videos are in the cache already" in again


def test_broken_members_and_changed_tars(one_ray, files, tmp_path):
    cache, broken = tmp_path / "cache", {"bad.mp4": b"no video", "bikes.mp4": files["bikes.mp4"]}
    argv, place = packed(tmp_path, broken), tmp_path / "tars"
    parts = [
        member("carphone.mp4", files["carphone_pristine.mp4"]),
        member("../up.mp4", b"x"),
        member("link.mp4", kind=b"2", linkname="/etc/passwd"),
        member("cut.mp4", bytes(9999))[:2000],
    ]
    (place / "b.tar").write_bytes(b"".join(parts))
    said_by(prune, *argv)
    failed = {"0.tar/bad.mp4": "unsupported", "b.tar/link.mp4": "policy", "b.tar/cut.mp4": "corrupt"}
    opened = TokenCache(cache)
    up = next(video_id for video_id in opened.failed if "up.mp4" in video_id)
    assert opened.failed == {**failed, up: "policy"} and opened.video_ids == ["0.tar/bikes.mp4", "b.tar/carphone.mp4"]

    bikes, bunny = files["bikes.mp4"], files["bigbuckbunny.mp4"]
    write_tar(place / "0.tar", {**broken, "bikes.mp4": bunny})
    assert "0.tar/bikes.mp4: the file had" in said_by(prune, *argv, code=2)
    write_tar(place / "0.tar", {"bad.mp4": bikes, "bikes.mp4": bunny, "new.mp4": bikes})
    write_tar(place / "b.tar", {"carphone.mp4": files["carphone_pristine.mp4"], "cut.mp4": bikes})
    said_by(prune, *argv, "--on-changed", "redo", "--retry-failed")
    opened = TokenCache(cache)
    ids = ["0.tar/bad.mp4", "0.tar/bikes.mp4", "0.tar/new.mp4", "b.tar/carphone.mp4", "b.tar/cut.mp4"]
    assert opened.video_ids == ids and opened.metadata("0.tar/bad.mp4")["attempts"] == 2


def contents_below(cache: Path) -> dict[str, str]:
    """Each file below a cache as text: its bytes, what they are when decompressed, and all columns of a table."""
    found = {}
    for file in cache.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            texts = [data.decode("latin-1"), zlib.decompress(data).decode() if file.suffix == ".zlib" else ""]
            if file.suffix == ".parquet" and data.endswith(b"PAR1"):
                texts.append(str(pq.read_table(file).to_pylist()))
            found[file.relative_to(cache).as_posix()] = "\n".join(texts)
    return found


def test_after_a_removal_no_byte_of_a_video_s_texts_is_left(one_ray, files, tmp_path):
    place, cache, clip = tmp_path / "tars", tmp_path / "cache", files["bikes.mp4"]
    place.mkdir()
    alone = place / "lone-wolf.mp4"
    alone.write_bytes(clip)
    members = {"stay.mp4": clip, "stay.txt": b"a kept caption", "zebra.mp4": clip, "zebra.txt": b"striped-caption"}
    broken = {"okapi.mp4": b"no video", "okapi.json": b'{"says": "shy-caption"}', "zebra.cls": bytes(2**17)}
    write_tar(place / "a.tar", {**members, **broken})
    argv = [str(place / "a.tar"), str(alone), "--out", str(cache), *OPTIONS]
    said_by(prune, *argv)
    (cache / "repaired").mkdir()
    shutil.copy(next((cache / "videos").iterdir()), cache / "repaired")
    (cache / "repaired" / "damaged.parquet").write_bytes(b"zebra")
    (next((cache / "runs").glob("*.json")).with_suffix(".log")).write_text(f"{place}/a.tar#zebra.mp4: frame 7\nstay")
    texts = ("zebra", "striped-caption", "okapi", "shy-caption", "lone-wolf")
    before = contents_below(cache)
    assert all(sum(text in content for content in before.values()) >= 2 for text in texts)

    ids = tmp_path / "ids"
    ids.write_text("a.tar/zebra.mp4\na.tar/okapi.mp4\nlone-wolf.mp4\n")
    argv_of_removal = [str(cache), "--ids", str(ids), "--reason", "takedown 17", "--keep-minutes", "0"]

    def assert_gone() -> None:
        for name, content in contents_below(cache).items():
            left = [text for text in texts if text in content]
            assert not left or (name.startswith("videos/") and not any("caption" in text for text in left)), name
            rows = pq.read_table(cache / name).to_pylist() if name.startswith("videos/") else ()
            for row in rows:
                if row["status"] == "removed":
                    assert {row[column] for column in ("uri", "manifest", "source_hash")} == {"", None}
        assert "a kept caption" in "".join(contents_below(cache).values())

    said_by(remove, *argv_of_removal)
    assert_gone()
    assert verify.main([str(cache)]) == 0
    argv.remove(str(alone))  # the record of a run has what its user names
    said_by(prune, *argv)
    assert "a.tar/stay.mp4" in TokenCache(cache).video_ids
    assert_gone()
    for _ in range(2):  # a tar that was packed anew is indexed anew
        write_tar(place / "a.tar", {**members, **broken, "more.mp4": clip})
        said_by(prune, *argv)
        assert "a.tar/more.mp4" in TokenCache(cache).video_ids
        assert_gone()
    sources = next((cache / "sources").iterdir())
    sources.write_bytes(zlib.compress(sources.read_bytes()))  # one that cannot be read
    said_by(remove, *argv_of_removal)  # which has no rows any more that tell the places
    assert_gone()


def test_a_dry_run_counts_tars_and_their_videos_where_it_may(corpus, tmp_path, monkeypatch):
    forbid_ray(monkeypatch)
    argv = [str(corpus / "a.tar"), "--out", str(tmp_path / "c"), *OPTIONS, "--dry-run"]
    listed = said_by(prune, *argv)
    assert "the videos of 1 archives" in listed and "0 to do" in listed
    counted = said_by(prune, *argv, "--index")
    assert "2 to do" in counted and "not counted" not in counted
    assert not (tmp_path / "c").exists()
    said_by(prune, *argv[:-1], "--index", code=2)


def test_tars_on_s3_give_equal_tokens_for_a_request_each_and_say_what_was_read(
    one_ray, corpus, few, tokens_of_files, tmp_path, monkeypatch
):
    with S3Server() as server:
        server.reach(monkeypatch)
        for number in range(2):
            server.upload(f"c/s-{number}.tar", (corpus / "a.tar").read_bytes())
        cache = tmp_path / "c"
        argv = [f"s3://{server.bucket}/c/s-{{0..1}}.tar", "--out", str(cache), *OPTIONS]
        said = said_by(prune, *argv)
        counts = server.counts()
        assert len(TokenCache(cache).video_ids) == 4 and counts["HEAD"] == 2 and counts["GET"] <= 2 * 4 + 4
        assert tokens(cache) == tokens_of_files
        told = json.loads(next((cache / "runs").iterdir()).read_text())["summary"]["fetched_bytes"]
        assert 2 * sum(map(len, few.values())) <= told <= 5 * sum(map(len, few.values()))
        assert "bytes of videos and indexes" in said
        server.requests.clear()
        forbid_ray(monkeypatch)
        said_by(prune, *argv)
        assert server.counts() == {"HEAD": 2}  # of each name one to find it


def test_an_id_in_two_tars_costs_one_video(one_ray, files, tmp_path, monkeypatch):
    clip, cache = files["carphone_distorted.mp4"], tmp_path / "cache"
    for place, members in (("p", {"a.mp4": clip, "b.mp4": clip}), ("q", {"a.mp4": files["bikes.mp4"], "c.mp4": clip})):
        (tmp_path / place).mkdir()
        write_tar(tmp_path / place / "0.tar", members)
    argv = [str(tmp_path / "p"), str(tmp_path / "q"), "--out", str(cache), *OPTIONS]
    assert "3 ok, 1 failed, 0 without a row" in said_by(prune, *argv)
    opened, first = TokenCache(cache), str(tmp_path / "p" / "0.tar")
    assert opened.video_ids == [f"0.tar/{name}.mp4" for name in "abc"]
    assert opened.metadata("0.tar/a.mp4")["source_shard"] == first
    assert opened.failed == {f"0.tar/a.mp4@{tmp_path}/q/0.tar#a.mp4": "corrupt"}
    before = sorted(cache.glob("[tsv]*/*"))  # tokens, sources, videos
    forbid_ray(monkeypatch)
    assert "4 of 4 videos are in the cache already" in said_by(prune, *argv)
    assert len(before) >= 4 and before == sorted(cache.glob("[tsv]*/*"))


class Gated(Tar):
    """A tar that is the last of a folder, whose index waits for a sign."""

    gate = threading.Event()

    def members(self, asked):
        if self._file.uri.endswith("5.tar"):
            assert self.gate.wait(240)
        yield from super().members(asked)


def test_the_first_videos_are_cached_while_a_later_tar_is_not_indexed(one_ray, files, tmp_path, monkeypatch):
    """It waits for ever if anything needs all indexes first."""
    members = {"a.mp4": files["bikes.mp4"], "b.txt": b"no video", "c.mp4": files["carphone_distorted.mp4"]}
    tars = [members if number != 2 else {"none.txt": b"no video in this one"} for number in range(6)]
    argv, cache = packed(tmp_path, *tars), tmp_path / "cache"
    ids = [f"{number}.tar/{name}.mp4" for number in range(6) for name in "ac" if number != 2]
    monkeypatch.setitem(FORMS, ".tar", Gated)
    seen: list[set[str]] = []

    def watch() -> None:
        wait_until(lambda: list((cache / "videos").glob("*.parquet")), "a commit")
        seen.append(set(TokenCache(cache).video_ids))
        Gated.gate.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    argv += ["--flush-seconds", "1", "--videos-per-shard", "2"]
    said = said_by(prune, *argv)
    watcher.join()
    assert seen[0] and not any(video_id.startswith("5.tar") for video_id in seen[0])
    assert_complete(cache, ids)
    (record,) = [json.loads(path.read_text()) for path in (cache / "runs").iterdir()]
    assert record["videos"] == record["summary"]["n_new"] == record["summary"]["n_ok"] == 10
    assert "10/10 videos, 0 failed" in said
    forbid_ray(monkeypatch)
    assert "10 of 10 videos are in the cache already" in said_by(prune, *argv)


def test_a_tar_that_changed_unseen_by_its_index_ends_the_run(one_ray, files, tmp_path):
    """Without a kept index the change is found on the way: nothing is overwritten, and the remedy is the same."""
    argv, cache = packed(tmp_path, *[{"a.mp4": files["bikes.mp4"]}] * 2), tmp_path / "cache"
    said_by(prune, *argv)
    before = tokens(cache)
    shutil.rmtree(cache / "sources")
    write_tar(tmp_path / "tars/1.tar", {"a.mp4": files["carphone_distorted.mp4"]})
    ended = said_by(prune, *argv, code=1)
    assert "1.tar/a.mp4: the file had" in ended
    assert "--on-changed redo" in ended and tokens(cache) == before
    said_by(prune, *argv, "--on-changed", "redo")
    assert TokenCache(cache).metadata("1.tar/a.mp4")["attempts"] >= 1 and tokens(cache) != before


def test_a_limit_opens_the_tars_that_it_needs_and_the_next_run_goes_on(one_ray, files, tmp_path):
    members = {f"{part}.mp4": files["carphone_distorted.mp4"] for part in "ab"}
    argv, cache = packed(tmp_path, *[members] * 5), tmp_path / "cache"
    for limit, ids in ((3, ["0.tar/a", "0.tar/b", "1.tar/a"]), (1, ["0.tar/a", "0.tar/b", "1.tar/a", "1.tar/b"])):
        said = said_by(prune, *argv, "--limit", limit)
        assert_complete(cache, [f"{video_id}.mp4" for video_id in ids])
        assert len(list((cache / "sources").iterdir())) == 2 and "3 archives are not indexed yet" in said
    said_by(prune, *argv)
    assert_complete(cache, [f"{number}.tar/{part}.mp4" for number in range(5) for part in "ab"])
