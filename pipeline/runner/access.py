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
from pipeline.runner.ray_folder import find_ray_folder

_REACH_S = 10.0
_TRIES = 3  # attempts to reach a cluster; Ray waits 40 s for each answer, which a busy one may need
_ALONE = "RAY_ADDRESS=local uses this machine alone"
_TOKEN = (
    "set RAY_AUTH_MODE=token, and give the cluster's token in RAY_AUTH_TOKEN, in ~/.ray/auth_token, or in a file named "
    "by RAY_AUTH_TOKEN_PATH"
)


def find_address() -> str | None:
    """Return the address of the cluster that ``ray.init()`` would join: RAY_ADDRESS, or one started by ``ray start``.

    Returns None where Ray starts a cluster of its own. Raises RunFailed for the address of a job server, where nothing
    listens, and if another user (not root) left the address, since joining a cluster runs its code here. An address of
    another user at which nothing listens is ignored.
    """
    environment_address = os.environ.get("RAY_ADDRESS", "")
    address = environment_address or read_ray_address()
    if address is None or address == "local":
        return None
    if address.startswith(("http://", "https://")):
        raise RunFailed(
            f"RAY_ADDRESS is {address}, the address of a job server: put ray job submit --working-dir . -- before the "
            "command, or name the cluster itself, HOST:6379"
        )
    file = None if environment_address else Path(get_ray_address_file(None))
    if file is not None and file.stat().st_uid not in {0, os.geteuid()}:  # every user may write to its folder
        try:
            _check_listens(address, file)
        except RunFailed:
            return None
        raise RunFailed(
            f"another user left the address of a Ray cluster in {file}, and that cluster could run its code here: "
            f"RAY_ADDRESS={address} joins it, {_ALONE}"
        )
    _check_listens(address, file)
    return address


def _check_listens(address: str, file: Path | None) -> None:
    """Raise RunFailed if nothing listens at an address; a word such as "auto" passes.

    ``file`` is the file in which ``ray start`` left the address; None if RAY_ADDRESS names it.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return  # a word like "auto" is no address
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        whence, remedy = "RAY_ADDRESS", "start its head"
        if file is not None:
            whence = f"which ray start wrote to {file}"
            if _is_this_machine(host):  # its head is dead: the file alone makes every later run fail
                remedy = f"its head has ended without ray stop: delete {file}, or start a head"
        raise RunFailed(
            f"no Ray cluster answers at {address} ({whence}): {error.strerror or error}; {remedy}, or {_ALONE}"
        ) from error


def _is_this_machine(host: str) -> bool:
    """Return True if ``host`` is an address of this machine: only then a socket can be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as local_socket:
            local_socket.bind(address)
    except OSError:
        return False
    return True


def check_answers(address: str) -> None:
    """Raise RunFailed if the cluster at ``address`` does not answer, or asks for a token that is missing.

    Ray itself would ask twenty times and say only that it failed. An address of Ray Client and a word without a port
    are not checked. A cluster found on this machine is not checked if this user has a token.
    """
    mode, is_discovered = os.environ.get("RAY_AUTH_MODE"), not os.environ.get("RAY_ADDRESS")
    if "://" in address or ":" not in address or (mode is None and is_discovered and _has_token()):
        return  # the port of Ray Client speaks another protocol; a cluster found here gets the token from Ray itself
    if mode == "token" and not _has_token():
        raise RunFailed(_describe_missing_token(address))  # Ray ends this process if it is asked without a token
    for tries_left in reversed(range(_TRIES)):
        try:
            GcsClient(address=address)
            return
        except ray.exceptions.RayError as error:
            if not tries_left or isinstance(error, ray.exceptions.AuthenticationError):
                raise RunFailed(describe_startup_failure(error, address)) from error


def set_cluster_token() -> None:
    """Set a new token in this process's environment for the cluster that ``ray.init()`` starts next.

    Ray would write one to ~/.ray/auth_token, where every later ``ray start`` finds and requires it. A token of the user
    is kept. Nothing is set if RAY_AUTH_MODE is "disabled".
    """
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    """Return True if Ray finds a token of the cluster."""
    configured_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(configured_token) or (Path.home() / ".ray" / "auth_token").exists()


def _describe_missing_token(address: str) -> str:
    """Format the error message for a cluster that asks for a token."""
    return f"the Ray cluster at {address} asks for a token that was not given: {_TOKEN}; or {_ALONE}"


def describe_startup_failure(error: Exception | None, address: str | None) -> str:
    """Return a one-line reason why Ray did not start or could not be joined, with what may help.

    ``error`` is None if Ray ended this process without an exception.
    """
    if error is None:
        description = "Ray's native code ended this process, as it does if the raylet of this node does not answer"
    else:
        description = printable(f"{type(error).__name__}: {error}")
    if isinstance(error, ray.exceptions.AuthenticationError):
        return _describe_missing_token(address or "this machine")
    if address is not None:
        check = "check the address (HOST:6379), that cluster and its token"
        return f"Ray cannot be joined at {address}: {description}; {check}, or {_ALONE}"
    return (
        f"Ray cannot be started on this machine: {description}; if the machine is busy, try again "
        f"later; else look at Ray's logs ({find_ray_folder()}/session_latest/logs), at the free space there and in "
        "/dev/shm and the free memory, or name a short path with RAY_TMPDIR"
    )


@contextmanager
def workers_import_this() -> Iterator[JobConfig | None]:
    """Join Ray inside this context from a folder that does not hide this package from the workers.

    Yields the job configuration for ``ray.init()``, or None for Ray's default. The current folder may be another inside
    the context.

    Joining puts the current folder first on the path of the workers, where a user's ``pipeline.py`` would hide this
    package. So a driver that does not import from there first (a console script) joins from the folder of this package.
    If the current folder is last on the driver's path, it is last on the workers' path too.
    """
    current_folder = str(Path.cwd())
    if {"", current_folder} & set(sys.path[:-1]):
        yield None
        return
    with chdir(Path(__file__).parents[2]):
        yield JobConfig(_py_driver_sys_path=[current_folder]) if sys.path[-1] == current_folder else None


_MAX_VIDEOS_PER_READ = 4  # videos in the memory of a read task
_MAX_SAMPLED_SHARDS = 4  # shards whose rows estimate the size of all videos


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
        cache: opened here; it travels to the nodes, with its store's credentials.
        ids: each id is read once; None for all videos that have tokens.
        blocks: read tasks; by default Ray's own choice. A task has a shard or more.

    Raises as ``TokenCache.get`` where the rows are read.
    """
    token_cache = cache if isinstance(cache, TokenCache) else TokenCache(cache)
    source = TokenSource(token_cache, ids, ReadOptions(retention_ratio, order, tuple(evidence)))
    return ray.data.read_datasource(source, override_num_blocks=blocks)


class TokenSource(Datasource):  # type: ignore[misc]  # Ray has no types
    """A Ray Data source that reads the videos of a cache, a row each."""

    def __init__(self, cache: TokenCache, ids: Sequence[str] | None, options: ReadOptions) -> None:
        super().__init__()
        self._cache, self._options = cache, options
        self._shards = cache.shards(ids)
        self._video_bytes = _estimate_video_bytes(cache, self._shards, options)

    def get_name(self) -> str:
        return "CachedTokens"

    def estimate_inmemory_data_size(self) -> int:
        return self._video_bytes * int(self._shards.counts.sum())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Make a task for each of ``parallelism`` groups of shards, or for each shard where there are fewer.

        Puts the cache into Ray's object store. ``data_context`` is not used.
        """
        cache = ray.put((self._cache, self._shards))
        n_tasks = max(1, min(parallelism, len(self._shards)))
        tasks = []
        for numbers in np.array_split(np.arange(len(self._shards)), n_tasks):
            n_videos = int(self._shards.counts[numbers].sum())
            metadata = BlockMetadata(
                num_rows=n_videos, size_bytes=self._video_bytes * n_videos, input_files=None, exec_stats=None
            )
            read = partial(_read_shards, cache, numbers.tolist(), self._options)
            tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
        return tasks


def _read_shards(cache_ref: ray.ObjectRef, numbers: Sequence[int], options: ReadOptions) -> Iterator[pa.Table]:
    """Read the videos of some shards, and yield a one-row table for each; runs in a read task."""
    cached: tuple[TokenCache, LiveShards] = ray.get(cache_ref)
    cache, shards = cached
    for number in numbers:
        rows = cache.rows_of(shards, number)
        for start in range(0, len(rows), _MAX_VIDEOS_PER_READ):
            for video in cache.get_rows(rows[start : start + _MAX_VIDEOS_PER_READ], *options):
                yield as_row(video)


def as_row(video: CachedVideo) -> pa.Table:
    """Return a video as one row with the columns that ``ray_dataset`` describes."""
    levels = {f"deepstack_{i}": level for i, level in enumerate(video.deepstack)}
    vectors = {"tokens": video.tokens, **levels, **{f"evidence_{name}": v for name, v in video.evidence.items()}}
    return pa.table(
        {
            "video_id": pa.array([video.video_id]),
            "hidden_size": pa.array([video.tokens.shape[1]], pa.int32()),
            "index": _to_number_list(video.index, pa.int32()),
            "rank": _to_number_list(video.rank, pa.int32()),
            "frame": _to_number_list(video.frame, pa.int32()),
            "merged": _to_number_list(video.merged, pa.bool_()),
            "density": _to_number_list(video.density, pa.float32()),
            "metadata": pa.array([json.dumps(video.metadata)]),
            **{name: _to_binary(values) for name, values in vectors.items()},
        }
    )


def _to_number_list(values: Tensor | None, kind: pa.DataType) -> pa.Array:
    """Return numbers as a column of one list, null for None."""
    return pa.array([None if values is None else values.numpy()], pa.list_(kind))


def _to_binary(values: Tensor) -> pa.Array:
    """Return the bits of bfloat16 numbers as a column of one binary value, without a copy."""
    data = pa.py_buffer(values.contiguous().view(torch.int16).numpy())
    ends = pa.py_buffer(np.array([0, data.size], np.int64))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, data])


def _estimate_video_bytes(cache: TokenCache, shards: LiveShards, options: ReadOptions) -> int:
    """Estimate the mean bytes of a video's row in memory, without evidence, from a few shards; 0 without a row."""
    numbers = range(0, len(shards), max(1, len(shards) // _MAX_SAMPLED_SHARDS))
    sample = [row for number in numbers[:_MAX_SAMPLED_SHARDS] for row in cache.rows_of(shards, number)]
    sizes = [
        count_tokens(row, options.retention_ratio) * (2 * row["hidden_size"] * (1 + cache.deepstack_levels) + 12)
        for row in sample
        if row["status"] == "ok"
    ]
    return int(np.mean(sizes)) if sizes else 0
