"""A cache from elsewhere, with symbolic links: nothing outside the cache is written or deleted."""

import json
import shutil
from pathlib import Path

import pytest

from jobs import compact, merge, remove, verify
from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.writer import commit_records
from pipeline.rewrite.compact import join_tokens
from pipeline.storage.stores import LocalStore
from tests.pipeline import verifying
from tests.pipeline.damage import shards
from tests.pipeline.verifying import NOW, kinds, tokens_of, verified


def read_all(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder and of those below it; linked folders are left out."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def link_folder(store: LocalStore, folder: str, place: Path) -> None:
    """Move a folder of the cache to a place outside, with files of somebody else, and leave a link to it."""
    (store.root / folder).mkdir(exist_ok=True)
    shutil.move(store.root / folder, place)
    others = ("run-other.parquet",) if folder == "tokens" else ()
    for name in (*others, ".tmp-other.parquet", "other.json", "other.log"):
        (place / name).write_bytes(b"a of somebody else")
    (store.root / folder).symlink_to(place)


COMMANDS = {
    "clean": (verify, "{0}/c --clean --keep-minutes 0"),
    "repair": (verify, "{0}/c --repair --keep-minutes 0"),
    "remove": (remove, "{0}/c --ids {0}/ids --reason x"),
    "join": (compact, "{0}/c --tokens --keep-minutes 0"),
    "compact": (compact, "{0}/c --keep-minutes 0"),
    "merge": (merge, "{0}/c {0}/other --out {0}/c"),
}


@pytest.mark.parametrize("folder", ["tokens", "videos", "runs", "repaired"])
def test_a_linked_folder_is_refused_by_commands_that_write_or_delete(store, tmp_path, capsys, folder):
    """jobs.verify --clean deleted the Parquet files of the folder that tokens/ linked to."""
    shutil.copytree(store.root, tmp_path / "other")
    (tmp_path / "ids").write_text("a\n")
    link_folder(store, folder, tmp_path / "elsewhere")
    before = read_all(tmp_path / "elsewhere"), read_all(store.root)
    for name, (command, arguments) in COMMANDS.items():
        assert command.main(arguments.format(tmp_path).split()) == 2, name
        assert f"{store.root}/{folder} is a symbolic link" in capsys.readouterr().err, name
        assert (read_all(tmp_path / "elsewhere"), read_all(store.root)) == before, name
    assert tokens_of(store.root).keys() == {"a", "b"}  # reading goes on


def test_the_store_itself_writes_and_deletes_nothing_there(store, tmp_path):
    link_folder(store, "tokens", tmp_path / "elsewhere")
    before = read_all(tmp_path / "elsewhere")
    for attempt in (store.delete, lambda name: store.put(name, b""), lambda name: store.link(name, tmp_path / "x")):
        with pytest.raises(OSError, match="symbolic link"):
            attempt("tokens/run-other.parquet")
    assert read_all(tmp_path / "elsewhere") == before


def test_a_linked_root_is_the_user_s_choice_and_of_a_linked_file_only_the_link_is_removed(store, tmp_path):
    (tmp_path / "link").symlink_to(store.root)
    secret, orphan = tmp_path / "secret.parquet", store.root / "tokens" / "run0-orphan.parquet"
    shutil.copy(shards(store)[0], secret)
    orphan.symlink_to(secret)
    assert verified(LocalStore(tmp_path / "link"), clean=True).removed == ["tokens/run0-orphan.parquet"]
    assert secret.exists() and not orphan.is_symlink()


def test_no_file_outside_a_source_is_linked_into_a_merged_cache(store, tmp_path):
    """A token shard of the source was a link to a file of this machine, which became a part of the result."""
    secret = tmp_path / "secret.parquet"
    secret.write_bytes(b"not the cache's")
    (file, _) = shards(store)
    file.unlink()
    file.symlink_to(secret)
    shutil.copytree(store.root, tmp_path / "other", symlinks=True)
    assert merge.main([str(store.root), str(tmp_path / "other"), "--out", str(tmp_path / "c2")]) == 1
    assert b"not the cache's" not in b"".join(read_all(tmp_path / "c2").values())


@pytest.mark.parametrize("name", ["cache.json", "videos/x.parquet", "../x.parquet", 5])
def test_names_in_rows_and_records_delete_no_file_but_token_shards(store, tmp_path, name):
    """A removed row of someone's cache could name cache.json as its token shard."""
    (tmp_path / "x.parquet").write_bytes(b"x")
    row = {"video_id": "gone", "uri": "", "status": "removed", "attempts": 0, "error_message": "x"}
    row["model_extra"] = json.dumps({"token_shards": [name]})
    commit_records(store, "run9", 0, [row], made_with=read_fingerprint(store))
    store.put("runs/evil0.json", json.dumps({"run_id": "evil0", "emptied": 5}).encode())
    store.put("runs/evil.json", json.dumps({"run_id": "evil", "emptied": [name]}).encode())
    verifying.remove(store, "gone")
    join_tokens(store, print, NOW)
    assert store.exists("cache.json") and (tmp_path / "x.parquet").exists()
    assert TokenCache(store.root).video_ids == ["a", "b"] and kinds(verified(store)) == []
