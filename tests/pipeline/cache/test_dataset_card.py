"""A cache loads by name as a dataset: its README.md has its two tables, and never replaces a user's file."""

import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.cache.header import has_generated_card, read_header, write_new_header
from pipeline.cache.merging import merge_table_fully
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.caches import write_shard
from tests.interpreter import run_python
from tests.pipeline.verifying import kinds, six_videos, verified, video_of

LOAD = """
import json, os, sys
from datasets import load_dataset

def count(*name):
    try:
        return load_dataset(sys.argv[1], *name, split="train", cache_dir=sys.argv[2]).num_rows
    except Exception as error:
        return type(error).__name__

print(json.dumps([count(), count("videos"), count("tokens")]))
"""


def load(store: LocalStore, cache: Path) -> list[int]:
    """Count the rows of the default table, of videos and of tokens, as datasets loads them without a network."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = run_python("-c", LOAD, store.root, cache, check=True, env=environment)
    counts: list[int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_a_cache_loads_as_a_dataset_by_the_names_of_its_tables(tmp_path):
    """datasets took the files of both tables for one, and failed on the columns."""
    store = six_videos(tmp_path / "c")
    write_new_header(store, read_header(store))
    assert load(store, tmp_path / "1") == [8, 8, 63]  # f has two rows
    merge_table_fully(store, None)
    write_shard(store, "run9", video_of("x", 9))
    assert load(store, tmp_path / "2") == [8, 8, 72]
    shutil.rmtree(store.root / "tokens")  # of a cache in which every video failed
    assert load(store, tmp_path / "3")[:2] == [8, 8]
    assert kinds(verified(six_videos(tmp_path / "d"))) == []


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_it_is_written_once_and_a_user_s_own_stays(tmp_path, server, place):
    source = six_videos(tmp_path / "source")
    header = read_header(source)
    for number, text in enumerate((None, b"# My cache\n")):
        out = (
            LocalStore(tmp_path / f"c{number}")
            if place == "folder"
            else ObjectStore(server.uri(f"c{number}"), server.objects())
        )
        out.make()
        if text is not None:
            out.put("README.md", text)
        assert not out.has_other_files()
        write_new_header(out, header)
        written = out.read("README.md")
        assert written == text or (text is None and b"Superseded rows are included" in written)
        assert has_generated_card(out) == (text is None)
        out.put("README.md", written + b"more")
        write_new_header(out, header)
        assert out.read("README.md") == written + b"more" and not has_generated_card(out) and out.has_other_files()
