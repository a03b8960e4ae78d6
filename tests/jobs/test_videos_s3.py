"""Videos on S3 end to end: one request each, nothing on disk, and the credentials in no place but memory."""

import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import ray

from jobs import inspect, prune
from pipeline import TokenCache
from pipeline.video.decode import fingerprint_file
from tests.builders.runs import clips, forbid_ray, run, said_by
from tests.builders.stores import KEY, SECRET, TOKEN, S3Server

pytestmark = pytest.mark.slow

BIG = 96 * 2**20
OPTIONS = ["--num-frames", "4", "--max-failed", "2"]


@pytest.fixture(scope="module")
def server():
    with S3Server() as opened:
        yield opened


@contextmanager
def watched(folder):
    """Yields a function for the most bytes that were seen below a folder at any one time."""
    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.05):
            with suppress(OSError):  # something was removed during this look
                peak.append(sum(path.lstat().st_size for path in list(folder.rglob("*"))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(peak)
    finally:
        done.set()
        thread.join()


def files_with(text, *folders):
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if text.encode() in path.read_bytes()]


def kinds(server):
    """(kind, key) of every request."""
    return sorted((request.kind, request.path.removeprefix(f"/{server.bucket}")) for request in server.requests)


def test_a_folder_on_s3_by_workers_that_have_no_credentials_of_their_own(
    server, one_ray, tmp_path, monkeypatch, capsys
):
    ray_folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
    names = [f"sub dir/ü {clip.name}" for clip in clips()]
    for name, clip in zip(names, clips(), strict=True):
        server.upload(f"all/{name}", clip.read_bytes())
    padding = BIG.to_bytes(4, "big") + b"free" + bytes(BIG - 8)  # a box of the file format that holds nothing
    server.upload("all/big.mp4", clips()[1].read_bytes() + padding)
    server.upload("all/empty.mp4", b"")
    server.upload("all/", b"")
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    temporary.mkdir()
    argv = [server.uri("all"), "--out", str(cache), *OPTIONS]
    with watched(temporary) as peak:
        done = run("jobs.prune", *argv, **server.environment(), TMPDIR=str(temporary), RAY_ADDRESS=one_ray)
    assert done.returncode == 0, done.stdout
    opened = TokenCache(cache)
    assert opened.video_ids == ["big.mp4", *names] and opened.failed == {"empty.mp4": "unsupported"}
    for name, clip in zip(names, clips(), strict=True):
        row = opened.metadata(name)
        assert (row["uri"], row["backend"]) == (server.uri(f"all/{name}"), "pyav")
        assert (row["source_size"], row["source_hash"]) == fingerprint_file(clip)
    assert opened.metadata("big.mp4")["source_size"] > BIG
    videos = ["big.mp4", "empty.mp4", *names]
    assert kinds(server) == [*sorted(("GET", f"/all/{name}") for name in videos), ("LIST", "")]
    assert peak() < BIG / 8

    for secret in (KEY, SECRET, TOKEN, server.url.partition("//")[2]):
        assert secret not in done.stdout
        assert files_with(secret, tmp_path, *ray_folder.glob("session_*/logs")) == []

    forbid_ray(monkeypatch)
    server.reach(monkeypatch)
    server.requests.clear()
    assert prune.main(argv) == 0 and "6 of 6 videos are in the cache already" in capsys.readouterr().err
    assert kinds(server) == [("LIST", "")]
    server.requests.clear()
    page = tmp_path / "page.html"
    assert "with pictures" in said_by(inspect, cache, names[1], "--html", page, "--video-root", server.uri())
    assert kinds(server) == [("GET", f"/all/{names[1]}")]
    assert files_with(SECRET, tmp_path) == files_with(KEY, tmp_path) == []
    server.upload(f"all/{names[1]}", b"longer" * 10**6)
    assert "changed since" in said_by(inspect, cache, names[1], "--html", page, "--video-root", server.uri())


@pytest.mark.parametrize("kind", ["public", "requester"])
def test_workers_read_as_the_driver_decided(server, one_ray, tmp_path, monkeypatch, kind):
    """The workers have no file of AWS and no variable, and the driver sends no request of its own before theirs."""
    headers, app = [], server._app

    def record(environ, start):
        headers.append({name: value for name, value in environ.items() if name.startswith("HTTP_")})
        return app(environ, start)

    monkeypatch.setattr(server, "_app", record)
    key = f"{kind}/a.mp4"
    server.upload(key, clips()[0].read_bytes())
    server.client.put_object_acl(Bucket=server.bucket, Key=key, ACL="public-read")
    headers.clear()
    (tmp_path / "config").write_text(f"[profile mine]\nendpoint_url = {server.url}\nregion = us-east-1\n")
    (tmp_path / "m.csv").write_text(f"video_id,uri\na,{server.uri(key)}\n")
    nothing = dict.fromkeys(server.environment(), "")
    files = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    options = {**nothing, **files, "AWS_PROFILE": "mine", "AWS_EC2_METADATA_DISABLED": "true"}
    flags = []
    if kind == "requester":
        flags = ["--s3-requester-pays"]
        options |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    argv = [str(tmp_path / "m.csv"), "--out", str(tmp_path / "c"), "--video-root", server.uri(), "--num-frames", "4"]
    done = run("jobs.prune", *argv, *flags, **options, RAY_ADDRESS=one_ray)
    assert done.returncode == 0 and TokenCache(tmp_path / "c").video_ids == ["a"], done.stdout
    assert ("Sources on S3 are read unsigned" in done.stdout) == (kind == "public")
    assert len(headers) == 1  # a GET of a worker
    payer = headers[0].get("HTTP_X_AMZ_REQUEST_PAYER")
    assert ("HTTP_AUTHORIZATION" in headers[0], payer) == ((False, None) if kind == "public" else (True, "requester"))
