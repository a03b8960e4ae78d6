"""A driver on S3 that is stopped (SIGSTOP) in the middle of its commit, as a laptop's lid or a debugger would do it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import botocore.client
import botocore.httpsession

from pipeline.cache.writer import PrunedVideo, commit, write_token_shard
from pipeline.errors import RunFailed
from pipeline.storage import lock
from pipeline.storage.lease import CacheLease
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import ObjectStore
from tests.paths import ROOT

BEAT = 1.0
ENDED_BY_THE_LOCK = 7


@contextmanager
def stopped_driver(
    root: str, place: str, video: PrunedVideo, environment: dict[str, str]
) -> Iterator[Callable[[], int]]:
    """A process that took the lock of the cache at ``root``, wrote the video's tokens and was stopped in its commit.

    Before the request is made ("request"), or when nothing is left but to send its bytes ("send"). Gives a function
    that lets it go on and returns its exit code.
    """
    command = [sys.executable, "-m", "tests.pipeline.stopping", root, place]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(video))
    process.stdin.close()

    def goes_on() -> int:
        process.send_signal(signal.SIGCONT)
        return process.wait(60)

    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        yield goes_on
    finally:
        process.kill()
        process.wait()


def stop_at(place: str) -> None:
    """From here on this process is stopped when it commits for the first time."""
    request, send = botocore.client.BaseClient._make_api_call, botocore.httpsession.URLLib3Session.send
    left = [None]

    def stopping(call: Callable[..., Any], commits: bool, *arguments: Any) -> Any:
        if commits and left:
            left.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(*arguments)

    def _make_api_call(self: Any, operation: str, params: dict[str, Any]) -> Any:
        commits = operation == "PutObject" and "/videos/" in params["Key"]
        return stopping(request, commits and place == "request", self, operation, params)

    def _send(self: Any, asked: Any) -> Any:
        return stopping(send, asked.method == "PUT" and "/videos/" in asked.url and place == "send", self, asked)

    botocore.client.BaseClient._make_api_call = _make_api_call
    botocore.httpsession.URLLib3Session.send = _send


def main(root: str, place: str) -> int:
    store = ObjectStore(root, Objects.from_environment())
    lock.CacheLease = partial(CacheLease, heartbeat_s=BEAT)
    stop_at(place)
    video = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the test itself; making one here would import torch
    try:
        with lock.cache_lock(store, "s", print) as held:
            rows = write_token_shard([video], store=store, run_id="s")
            held.check()
            commit(store, "s", 0, rows, lock=held)
    except RunFailed:
        return ENDED_BY_THE_LOCK
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
