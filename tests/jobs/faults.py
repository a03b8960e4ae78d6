"""Many tiny real videos, drivers that can be killed, and what may be visible in a cache after that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import av
import pyarrow.parquet as pq
import torch

import gstep
from gstep import PrunedTokens
from gstep.backbones import ModelSource, choose_runtime, family_of
from pipeline import TokenCache
from pipeline.storage.stores import LocalStore
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import add_stream, encode
from tests.builders.runs import committed
from tests.waiting import wait_until

N_VIDEOS, N_FRAMES = 72, 2
OPTIONS = ["--num-frames", str(N_FRAMES), "--log-interval", "5"]
FAST_BEAT, STOPS = 2.0, "the third commit comes now"
COUNTED = "tests.jobs.hostile:CountedDecoder"


def tiny_videos(folder: Path, count: int = N_VIDEOS) -> list[str]:
    """Write ``count`` different videos of 64x64 pixels and 2 to 8 frames, and return their ids."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"v{number:03}.mp4" for number in range(count)]
    for number, name in enumerate(names):
        with av.open(str(folder / name), "w") as out:
            stream = add_stream(out, "libx264", (64, 64), 25, 8, "yuv420p", {"preset": "ultrafast", "crf": "10"})
            stream.codec_context.thread_count = 1
            for frame in range(2 + number % 7):
                encode(out, stream, (number + 37 * frame) % 256, (64, 64), None)
            out.mux(stream.encode(None))
    return names


def fork(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Start a process that is forked from a server in which everything that a command imports is loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.jobs.preload"])
    process = context.Process(target=target, args=args)
    process.start()
    return process


def die_at_call(number: int, methods: tuple[str, ...], command: list[str], log: Path) -> int | None:
    """Run ``python -m <command>``, killed as it is about to call one of the methods of LocalStore once more.

    It may call them ``number`` times. A rewrite writes two videos a shard. Returns the exit code.
    """
    process = fork(_die_at_call, number, methods, command, str(log))
    process.join()
    return process.exitcode


def _die_at_call(number: int, methods: tuple[str, ...], command: list[str], log: str) -> None:
    from pipeline.rewrite import recode  # noqa: PLC0415

    begin_forked(log, {})
    recode._SHARD_VIDEOS = 2
    calls = count()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if next(calls) >= number:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **more)

        return call

    for name in methods:
        setattr(LocalStore, name, counted(getattr(LocalStore, name)))
    sys.exit(import_module(command[0]).main(command[1:]))


class Driver:
    """``python -m <command>`` as a process of its own, without the seconds that its imports take.

    It is forked from a server that has them loaded. ``before`` runs in it first: a function of a module.
    """

    def __init__(
        self,
        argv: list[str],
        log: Path,
        before: Callable[[], None] | None = None,
        command: str = "jobs.prune",
        **environ: str,
    ) -> None:
        self._process = fork(_drive, command, argv, str(log), before, environ)
        self._log = log

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def running(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """Send SIGKILL, and return when the driver is gone."""
        self._process.kill()
        assert self.wait() == -signal.SIGKILL, self.output

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that comes about while it runs; one that ended before fails the test."""
        wait_until(lambda: condition() or not self.running(), lambda: f"{what}: {self.output}")
        assert self.running(), f"it ended with {self._process.exitcode} before: {what}: {self.output}"

    def wait(self, timeout: float = 120) -> int:
        """Wait for the driver and return its exit code, negative for a signal."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, self.output
        return code


def _drive(command: str, argv: list[str], log: str, before: Callable[[], None] | None, environ: dict[str, str]) -> None:
    begin_forked(log, environ)
    if before is not None:
        before()
    code = import_module(command).main(argv)
    sys.stdout.flush()
    os._exit(code)


def begin_forked(log: str, environ: dict[str, str]) -> None:
    """Give a process that was forked with all imports done its output and its environment."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environ)


def die_before_the_third_commit() -> None:
    """Make this driver kill itself after a token shard was written and before its videos shard is."""
    _signal_before_the_third_commit(signal.SIGKILL)


def die_before_the_third_commit_of_answers() -> None:
    """Make this driver kill itself before its third shard of answers is committed."""
    _signal_before_the_third_commit(signal.SIGKILL, "pipeline.generate.run", "commit_answers")


def stop_before_the_third_commit() -> None:
    """Make this driver stop itself there, after it said so; its note has a sign of life every two seconds."""
    from pipeline.prune import run  # noqa: PLC0415

    run.Claim = partial(run.Claim, heartbeat_s=FAST_BEAT)  # type: ignore[assignment,misc]
    _signal_before_the_third_commit(signal.SIGSTOP)


def _signal_before_the_third_commit(
    number_of_signal: signal.Signals, module: str = "pipeline.prune.table", name: str = "commit_rows"
) -> None:
    run, commits = import_module(module), count(1)
    commit = getattr(run, name)

    def commit_or_not(*args: Any, **more: Any) -> Any:
        if next(commits) == 3:  # the number of a shard may skip some: several are committed together
            print(STOPS, flush=True)
            os.kill(os.getpid(), number_of_signal)
        return commit(*args, **more)

    setattr(run, name, commit_or_not)


def die_in_a_merge() -> None:
    """Make this driver kill itself right behind the first merged file of the table, which comes early."""
    from pipeline.cache.table import parse_file_name  # noqa: PLC0415
    from pipeline.prune import table  # noqa: PLC0415

    table.MAX_WAITING_FILES = 2  # type: ignore[attr-defined]
    put = LocalStore.put

    def put_and_die(store: LocalStore, name: str, data: Any) -> None:
        put(store, name, data)
        if name.startswith("videos/") and parse_file_name(name).level:
            os.kill(os.getpid(), signal.SIGKILL)

    LocalStore.put = put_and_die  # type: ignore[method-assign]


def files(cache: Path, folder: str) -> list[Path]:
    """List the finished files of a folder of the cache."""
    return sorted(path for path in (cache / folder).glob("*.parquet") if not path.name.startswith("."))


def calls(videos: Path) -> Counter[str]:
    """Count how often CountedDecoder was asked for each video."""
    log = videos / "calls"
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


class Visible:
    """What a cache shows, held against the readable steps on the same files: whole files, each video once, each bit."""

    def __init__(self, videos: Path) -> None:
        source = ModelSource.resolve("tiny")
        self._videos = videos
        self._preprocessor = family_of(source).preprocessor()
        self._backbone = family_of(source).load(choose_runtime("cpu", "auto"))
        self._expected: dict[str, PrunedTokens] = {}
        self._whole: set[Path] = set()

    @property
    def ids(self) -> list[str]:
        return sorted(path.name for path in self._videos.glob("*.mp4"))

    def _expect(self, video_id: str) -> PrunedTokens:
        """Decode, encode and prune a video of the folder without Ray, the first time that it is asked for."""
        if video_id not in self._expected:
            request = DecodeRequest(self._videos / video_id, Sampling(num_frames=N_FRAMES), self._preprocessor)
            tokens = self._backbone.encode(decode_video(request).frames).tokens
            self._expected[video_id] = gstep.prune(tokens.to(torch.bfloat16), 0.25)
        return self._expected[video_id]

    def check(self, cache: Path) -> list[str]:
        """Check what a cache in a folder shows, and return the ids.

        Whatever is torn, doubled or different fails the test.
        """
        for path in {*files(cache, "tokens"), *files(cache, "videos")} - self._whole:
            pq.read_table(path, page_checksum_verification=True)
            self._whole.add(path)
        return self.check_rows(TokenCache(cache)) if (cache / "cache.json").exists() else []

    def check_rows(self, opened: TokenCache) -> list[str]:
        """Check the rows of an opened cache likewise, without a look at files that its rows do not name."""
        rows = committed(opened.store)
        assert len(rows) == len(set(rows)), "a video has two rows"
        assert sorted(rows) == opened.video_ids, "a video failed"
        for video_id in rows:
            seen, expected = opened.get(video_id), self._expect(video_id)
            assert torch.equal(seen.tokens.view(torch.int16), expected.tokens.view(torch.int16))
            assert torch.equal(seen.index, expected.index)
            assert seen.rank is not None and torch.equal(seen.rank, expected.rank)
        return rows

    def assert_complete(self, cache: Path) -> None:
        """Assert that the cache shows every video."""
        assert sorted(self.check(cache)) == self.ids
