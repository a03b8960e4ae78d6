"""Access to a Ray cluster: its address, and the token that it asks for."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from ray._private.utils import get_ray_address_file, read_ray_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # what ray.init() asks; its stubs leave it out
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.job_config import JobConfig
from torch import Tensor

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.live import LiveShards
from pipeline.cache.reader import TokenCache, TokenOrder, count_tokens
from pipeline.errors import RunFailed, printable

_REACH_S = 10.0
_TRIES = 3  # attempts to reach a cluster; Ray waits 40 s for each answer, which a busy one may need
_ALONE = "RAY_ADDRESS=local uses this machine alone"
_TOKEN = (
    "set RAY_AUTH_MODE=token, and give the cluster's token in RAY_AUTH_TOKEN, in ~/.ray/auth_token, or in a file named "
    "by RAY_AUTH_TOKEN_PATH"
)


def address_to_join() -> str | None:
    """Return the address of the cluster that ``ray.init()`` would join: RAY_ADDRESS, or one started by ``ray start``.

    Returns None where Ray starts a cluster of its own. Raises RunFailed for the address of a job server, and where
    nothing listens.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    address = given or read_ray_address()
    if address is None or address == "local":
        return None
    if address.startswith(("http://", "https://")):
        raise RunFailed(
            f"RAY_ADDRESS is {address}, the address of a job server: put ray job submit --working-dir . -- before the "
            "command, or name the cluster itself, HOST:6379"
        )
    _check_listens(address, None if given else Path(get_ray_address_file(None)))
    return address


def _check_listens(address: str, left_in: Path | None) -> None:
    """Raise RunFailed if nothing listens at an address: RAY_ADDRESS, or one that ray start has ``left_in`` a file."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # a word like "auto" is no address
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        whence, remedy = "RAY_ADDRESS", "start its head"
        if left_in is not None:
            whence = f"which ray start left in {left_in}"
            if _is_this_machine(host):  # its head is dead: the file alone makes every later run fail
                remedy = f"its head has ended without ray stop: delete {left_in}, or start a head"
        raise RunFailed(
            f"no Ray cluster answers at {address} ({whence}): {error.strerror or error}; {remedy}, or {_ALONE}"
        ) from error


def _is_this_machine(host: str) -> bool:
    """Return whether an address is one of this machine's: only then a socket can be bound to it."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(place)
    except OSError:
        return False
    return True


def check_answers(address: str) -> None:
    """Check that the cluster at ``address`` answers; Ray itself would ask twenty times and say only that it failed.

    Raises RunFailed where the cluster does not answer, or asks for a token that is not there.
    """
    mode, found = os.environ.get("RAY_AUTH_MODE"), not os.environ.get("RAY_ADDRESS")
    if "://" in address or ":" not in address or (mode is None and found and _has_token()):
        return  # the port of Ray Client speaks another protocol; a cluster found here gets the token from Ray itself
    if mode == "token" and not _has_token():
        raise RunFailed(_token_missing(address))  # Ray ends this process if it is asked without a token
    for tries_left in reversed(range(_TRIES)):
        try:
            GcsClient(address=address)
            return
        except ray.exceptions.RayError as error:
            if not tries_left or isinstance(error, ray.exceptions.AuthenticationError):
                raise RunFailed(startup_failure(error, address)) from error


def set_cluster_token() -> None:
    """Give the cluster that ``ray.init()`` starts next a token in this process's environment.

    Ray would write one to ~/.ray/auth_token, where every later ``ray start`` finds it and asks for it. A token that the
    user has set is kept.
    """
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    """Return whether Ray finds a token of the cluster."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").exists()


def _token_missing(address: str) -> str:
    """Format the error message for a cluster that asks for a token."""
    return f"the Ray cluster at {address} asks for a token that was not given: {_TOKEN}; or {_ALONE}"


def startup_failure(error: Exception, address: str | None) -> str:
    """Return a one-line reason why Ray did not start or could not be joined, with what may help."""
    what = printable(f"{type(error).__name__}: {error}")
    if isinstance(error, ray.exceptions.AuthenticationError):
        return _token_missing(address or "this machine")
    if address is not None:
        check = "check the address (HOST:6379), that cluster and its token"
        return f"Ray cannot be joined at {address}: {what}; {check}, or {_ALONE}"
    return (
        f"Ray cannot be started on this machine: {what}; where the machine is busy, try again when it is less so; else "
        "look at Ray's logs (RAY_TMPDIR, else /tmp/ray, in session_latest/logs), at the room in /tmp, /dev/shm and "
        "memory, and name a short path with RAY_TMPDIR if that is it"
    )


@contextmanager
def workers_import_this() -> Iterator[JobConfig | None]:
    """Join Ray from a folder that does not hide this package from the workers, with the configuration that is yielded.

    Joining puts the current folder first on the path of the workers, where a user's ``pipeline.py`` would hide this
    package. A driver that does not import from there first itself (a console script) joins from the folder of this
    package instead; where the current folder is last on its own path, it is behind this package on the workers'.
    """
    here = str(Path.cwd())
    if {"", here} & set(sys.path[:-1]):
        yield None
        return
    with chdir(Path(__file__).parents[2]):
        yield JobConfig(_py_driver_sys_path=[here]) if sys.path[-1] == here else None


_VIDEOS_AT_ONCE = 4  # videos in the memory of a read task
_SAMPLED_SHARDS = 4  # shards from whose rows the size of the others is estimated


class ReadOptions(NamedTuple):
    """The options of reading a video, as of ``TokenCache.get``."""

    retention_ratio: float | None = None
    order: TokenOrder = "index"
    evidence: tuple[str, ...] = ()


def ray_dataset(
    cache: TokenCache | str | Path,
    ids: Sequence[str] | None = None,
    *,
    retention_ratio: float | None = None,
    order: TokenOrder = "index",
    evidence: Sequence[str] = (),
    blocks: int | None = None,
) -> ray.data.Dataset:
    """Read the videos of a cache as a Ray Dataset: a row a video, in the order of the shards.

    Columns: ``video_id``; ``tokens``, the bytes of [K, ``hidden_size``] little-endian bfloat16, which Arrow and numpy
    do not have; ``index``, ``rank``, ``frame`` [K] int32, ``merged`` and ``density`` [K], null where a method has none;
    ``deepstack_0`` and so on like ``tokens``; ``evidence_<name>`` likewise; ``metadata``, the videos row as JSON::

        tokens = torch.frombuffer(bytearray(row["tokens"]), dtype=torch.bfloat16).view(-1, row["hidden_size"])

    Args:
        cache: opened here; it travels to the nodes, with what its store needs to be reached.
        ids: each is read once; None for all videos that have tokens.
        blocks: read tasks; by default Ray's own choice. No task has less than a shard.

    Raises as ``TokenCache.get`` where the rows are read.
    """
    opened = cache if isinstance(cache, TokenCache) else TokenCache(cache)
    source = TokenSource(opened, ids, ReadOptions(retention_ratio, order, tuple(evidence)))
    return ray.data.read_datasource(source, override_num_blocks=blocks)


class TokenSource(Datasource):  # type: ignore[misc]  # Ray has no types
    """A Ray Data source that reads the videos of a cache, a row each."""

    def __init__(self, cache: TokenCache, ids: Sequence[str] | None, options: ReadOptions) -> None:
        super().__init__()
        self._cache, self._options = cache, options
        self._shards = cache.shards(ids)
        self._video_bytes = _bytes_of_a_video(cache, self._shards, options)

    def get_name(self) -> str:
        return "CachedTokens"

    def estimate_inmemory_data_size(self) -> int:
        return self._video_bytes * int(self._shards.counts.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Make a task for each of ``parallelism`` groups of shards, or for each shard where there are fewer."""
        cache = ray.put((self._cache, self._shards))
        n_tasks = max(1, min(parallelism, len(self._shards)))
        tasks = []
        for numbers in np.array_split(np.arange(len(self._shards)), n_tasks):
            n_videos = int(self._shards.counts[numbers].sum())
            metadata = BlockMetadata(
                num_rows=n_videos, size_bytes=self._video_bytes * n_videos, input_files=None, exec_stats=None
            )
            read = partial(_read, cache, numbers.tolist(), self._options)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _read(held: ray.ObjectRef, numbers: Sequence[int], options: ReadOptions) -> Iterator[pa.Table]:
    """Read the videos of some shards in a read task, and yield a one-row table each."""
    opened: tuple[TokenCache, LiveShards] = ray.get(held)
    cache, shards = opened
    for number in numbers:
        rows = cache.rows_of(shards, number)
        for start in range(0, len(rows), _VIDEOS_AT_ONCE):
            for video in cache.get_rows(rows[start : start + _VIDEOS_AT_ONCE], *options):
                yield as_row(video)


def as_row(video: CachedVideo) -> pa.Table:
    """Return a video as one row with the columns that ``ray_dataset`` describes."""
    levels = {f"deepstack_{i}": level for i, level in enumerate(video.deepstack)}
    vectors = {"tokens": video.tokens, **levels, **{f"evidence_{name}": v for name, v in video.evidence.items()}}
    return pa.table(
        {
            "video_id": pa.array([video.video_id]),
            "hidden_size": pa.array([video.tokens.shape[1]], pa.int32()),
            "index": _numbers(video.index, pa.int32()),
            "rank": _numbers(video.rank, pa.int32()),
            "frame": _numbers(video.frame, pa.int32()),
            "merged": _numbers(video.merged, pa.bool_()),
            "density": _numbers(video.density, pa.float32()),
            "metadata": pa.array([json.dumps(video.metadata)]),
            **{name: _bytes(values) for name, values in vectors.items()},
        }
    )


def _numbers(values: Tensor | None, kind: pa.DataType) -> pa.Array:
    """Return numbers as a column of one list, null for None."""
    return pa.array([None if values is None else values.numpy()], pa.list_(kind))


def _bytes(values: Tensor) -> pa.Array:
    """Return the bits of bfloat16 numbers as a column of one binary value, without a copy."""
    data = pa.py_buffer(values.contiguous().view(torch.int16).numpy())
    ends = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, data])


def _bytes_of_a_video(cache: TokenCache, shards: LiveShards, options: ReadOptions) -> int:
    """Estimate the bytes of a video's row in memory, without evidence, from the rows of a few shards."""
    numbers = range(0, len(shards), max(1, len(shards) // _SAMPLED_SHARDS))
    sample = [row for number in numbers[:_SAMPLED_SHARDS] for row in cache.rows_of(shards, number)]
    sizes = [
        count_tokens(row, options.retention_ratio) * (2 * row["hidden_size"] * (1 + cache.deepstack_levels) + 12)
        for row in sample
        if row["status"] == "ok"
    ]
    return int(np.mean(sizes)) if sizes else 0
