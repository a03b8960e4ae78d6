"""An exported cache goes to a dataset of a hub: by the stock client, to a small server with the routes of the hub."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest

from pipeline import TokenCache
from pipeline.errors import RemovedVideo, UsageError
from pipeline.sharing.publish import repository_of
from pipeline.storage.stores import LocalStore
from pipeline.verify.removal import remove_videos
from tests.paths import ROOT
from tests.pipeline.caches import encoded, random_tokens, write_shard
from tests.pipeline.damage import say_what_was_committed
from tests.pipeline.hub import REPO, HubServer
from tests.pipeline.sharing.test_merge import SHAPE, cache_of, quiet

PLACE = f"hf://datasets/{REPO}"


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hub").mkdir()
    with HubServer(tmp_path / "hub") as server:
        yield server


def export(hub, tmp_path, *more, source="c", code=0, to=PLACE):
    """Run the command in a process of its own, since the client reads its settings once; return its document."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {
        **here,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    argv = [str(tmp_path / source), "--to", to, "--staging", str(tmp_path / "staging"), "--json", *more]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.export", *argv], cwd=tmp_path, env={**environment, "HF_HOME": str(tmp_path / "h")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout)


def uploaded(hub):
    return {path.relative_to(hub.folder).as_posix() for path in hub.folder.rglob("*") if path.is_file()}


@pytest.mark.slow  # commands in processes of their own
def test_a_cache_is_uploaded_goes_on_and_follows_removals(hub, tmp_path):
    store = cache_of(tmp_path / "c", {"a": 1, "b": 2, "gone": 3})
    said = export(hub, tmp_path)
    assert (said["to"], said["videos"], said["published"]["sent"], said["published"]["there"]) == (PLACE, 3, 4, 0)
    names = [[path for _, path in commit] for commit in hub.commits]
    assert names[0] == ["cache.json"] and names[-1] == ["README.md"]
    assert [path.partition("/")[0] for path in names[1]] == ["tokens"] * 3 + ["videos"]
    assert TokenCache(hub.folder).video_ids == ["a", "b", "gone"]  # what lies there is a cache
    assert "runs" not in {name.partition("/")[0] for name in uploaded(hub)}

    # The same again sends nothing, and a card that was filled in stays.
    (hub.folder / "README.md").write_text("filled in")
    (hub.folder / "videos/example.mp4").write_text("somebody's own, for the card")
    (hub.folder / "there").write_text("")  # the dataset exists now
    before = hub.count("upload"), len(hub.commits)
    assert export(hub, tmp_path)["published"] == {"sent": 0, "sent_bytes": 0, "there": 4, "deleted": 0}
    assert (hub.count("upload"), len(hub.commits)) == before

    # A removed video's tokens are deleted there, a new video comes, and the rest is not sent again.
    write_shard(store, "later", encoded("new", random_tokens(9, SHAPE), 0.25, "gstep"))
    say_what_was_committed(store)
    old = {name for name in uploaded(hub) if name.startswith("tokens/")}
    remove_videos(store, ["gone"], "licence", quiet, timedelta(0))
    done = export(hub, tmp_path)["published"]
    tokens = {name for name in uploaded(hub) if name.startswith("tokens/")}
    assert (done["sent"], done["deleted"], len(tokens), len(tokens & old)) == (2, 2, 3, 2)
    cache = TokenCache(hub.folder)
    assert cache.video_ids == ["a", "b", "new"] and (hub.folder / "README.md").read_text() == "filled in"
    assert "videos/example.mp4" in uploaded(hub)
    with pytest.raises(RemovedVideo):
        cache.get("gone")
    assert not any(b"gone" in (hub.folder / name).read_bytes() for name in tokens)


@pytest.mark.slow  # commands in processes of their own
@pytest.mark.parametrize("broken", [("upload", 1), ("commit", 1), ("commit", 2)])
def test_an_upload_that_broke_off_goes_on(hub, tmp_path, broken):
    cache_of(tmp_path / "c", {"a": 1, "b": 2, "d": 3})
    hub.fail = broken
    said = export(hub, tmp_path, code=1)
    assert said["error"]["class"] == "OSError" and "the hub did not take it" in said["error"]["message"]
    hub.fail = None
    export(hub, tmp_path)
    assert TokenCache(hub.folder).video_ids == ["a", "b", "d"]
    assert len(hub.taken) == len(set(hub.taken)) == 4  # no object was taken twice


@pytest.mark.slow  # commands in processes of their own
def test_wrong_places_are_refused_before_anything_is_sent(hub, tmp_path):
    cache_of(tmp_path / "c", {"a": 1})
    hub.refuse = 403
    said = export(hub, tmp_path, code=1)
    assert "hf auth login" in said["error"]["message"] and PLACE in said["error"]["message"]
    hub.refuse = None
    (hub.folder / "videos").mkdir()
    (hub.folder / "videos/mine.parquet").write_text("x")
    assert "holds files that are no cache (videos/mine.parquet)" in export(hub, tmp_path, code=2)["error"]["message"]
    header = json.loads((tmp_path / "c/cache.json").read_text())
    header["identity"]["retention_ratio"] = 0.5
    (hub.folder / "cache.json").write_text(json.dumps(header))
    said = export(hub, tmp_path, code=2)["error"]
    assert (
        said["class"] == "IdentityMismatch"
        and "retention_ratio: the dataset has 0.5, this cache 0.25" in said["message"]
    )
    assert "hf://datasets/OWNER/NAME" in export(hub, tmp_path, code=2, to="hf://models/a/b")["error"]["message"]
    assert hub.commits == [] and (hub.folder / "videos/mine.parquet").read_text() == "x"


def test_addresses_of_datasets():
    assert repository_of("hf://datasets/me/it") == ("me/it", None)
    assert repository_of("hf://datasets/me/it@refs/pr/1/") == ("me/it", "refs/pr/1")
    for wrong in ("hf://datasets/it", "hf://datasets/me/it/tokens", "hf://me/it"):
        with pytest.raises(UsageError, match="OWNER/NAME"):
            repository_of(wrong)


def test_a_copy_that_is_made_again_drops_the_tokens_of_removed_videos(tmp_path):
    from pipeline.sharing.export import export as export_cache  # noqa: PLC0415

    store, out = cache_of(tmp_path / "c", {"a": 1, "gone": 3}), LocalStore(tmp_path / "out")
    export_cache(store, out, quiet)
    say_what_was_committed(store)
    remove_videos(store, ["gone"], "licence", quiet, timedelta(0))
    assert export_cache(store, out, quiet).files == 1
    assert not any(b"gone" in file.read_bytes() for file in (out.root / "tokens").iterdir())
