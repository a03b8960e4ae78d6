"""Make the same videos as files, in tars and in a Parquet column, on disk or on a server of the S3 protocol."""

from __future__ import annotations

import io
import logging
import random
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from urllib.request import Request, urlopen
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.benchmark.pipeline.work import BUCKET, COLUMN, FOLDER, TAR, Work
from pipeline.errors import UsageError

_PADDING = 2**20  # bytes of a box that holds nothing, so that each video is as large as a real one
_PER_TAR, _PER_ROW_GROUP = 30, 40
_KEYS = {"AWS_ACCESS_KEY_ID": "forms", "AWS_SECRET_ACCESS_KEY": "forms", "AWS_REGION": "us-east-1"}


@contextmanager
def corpus(work: Work) -> Iterator[tuple[Mapping[str, str], Mapping[str, float]]]:
    """Make the videos of a work in its form, if it has one; yield the environment for its store, and what that sends.

    Raises UsageError where moto is missing.
    """
    files = _files(work) if work.form else ()
    if work.on_s3:
        with _s3_server(files) as served:
            yield served
        return
    for name, data in files:
        path = Path(work.folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    yield {}, {}


def _files(work: Work) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a corpus."""
    clip = work.manifest.with_name("clip.mp4").read_bytes() + _PADDING.to_bytes(4, "big") + b"free"
    names = (f"{number:06d}.mp4" for number in range(work.videos))
    videos = ((name, clip + random.Random(name).randbytes(_PADDING - 8)) for name in names)
    if work.form == FOLDER:
        yield from ((f"{work.form}/{name}", data) for name, data in videos)
    elif work.form == COLUMN:
        ids, contents = zip(*videos, strict=True)
        pq.write_table(pa.table({"video_id": ids, "video": contents}), table := io.BytesIO(), _PER_ROW_GROUP)
        yield f"{work.form}/0.parquet", table.getvalue()
    else:
        per_tar = work.videos if work.form == TAR else _PER_TAR
        for start in range(0, work.videos, per_tar):
            yield f"{work.form}/{start:06d}.tar", _tar(islice(videos, per_tar))


def _tar(videos: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a tar of videos."""
    with tarfile.open(fileobj=(data := io.BytesIO()), mode="w") as tar:
        for name, content in videos:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


@contextmanager
def _s3_server(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[Mapping[str, str], Mapping[str, float]]]:
    """Serve files by moto's S3 server in this process, whose processor time is not the job's, as ``corpus`` yields."""
    if find_spec("moto") is None or find_spec("boto3") is None:
        raise UsageError("--s3 needs moto and boto3: pip install 'moto[server]' boto3")
    import boto3  # noqa: PLC0415 - only with --s3
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    server, seen = ThreadedMotoServer("127.0.0.1", 0, verbose=False), dict[str, float]()
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        access = {name.lower(): value for name, value in _KEYS.items() if "KEY" in name}
        client = boto3.client("s3", endpoint_url=url, region_name=_KEYS["AWS_REGION"], **access)
        client.create_bucket(Bucket=BUCKET)
        for name, data in files:
            client.put_object(Bucket=BUCKET, Key=name, Body=data)
        serving = server._server
        assert serving is not None
        serving.app = _counted(serving.app, seen)
        yield {"AWS_ENDPOINT_URL": url, **_KEYS}, seen
    finally:
        urlopen(Request(f"{url}/moto-api/reset", method="POST")).close()  # all servers of a process share their objects
        server.stop()


def _counted(application: WSGIApplication, seen: dict[str, float]) -> WSGIApplication:
    """Return a WSGI application that counts requests by kind, and the MB (10^6 bytes) that it sends."""
    lock = threading.Lock()

    def count(kind: str, number: float) -> None:
        with lock:
            seen[kind] = seen.get(kind, 0.0) + number

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        count("LISTs" if "list-type=" in environ.get("QUERY_STRING", "") else f"{environ['REQUEST_METHOD']}s", 1)
        for piece in application(environ, start_response):
            count("sent MB", len(piece) / 1e6)
            yield piece

    return answer
