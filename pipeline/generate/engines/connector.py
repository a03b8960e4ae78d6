"""vLLM's workers read a cache by themselves: its encoder cache is filled from Parquet, and requests carry names alone.

A connector of vLLM (``--ec-transfer-config``) has two sides. The scheduler's asks the workers for the rows of a request
before it schedules it, over a socket that carries names; the workers' reads them in threads, and puts them into the
encoder cache in the step that needs them. So cold reads stand before nothing that is held, and a read that fails ends
its own requests and not the engine. Follows ECConnectorBase of vLLM 0.32, model runners V1 and V2.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from gstep.serving.items import SEPARATOR
from pipeline.cache.reader import TokenCache
from pipeline.errors import CorruptShard, UnknownVideo
from pipeline.generate.engines.cached_rows import PREFIX, RowReader

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pipeline.cache.cached_video import PackedRows

#: Caches that this process has opened already, by place: a worker in it reads them as they were opened.
OPENED: Final[dict[str, TokenCache]] = {}
_FAULT_S = 1.0  # so long a fault answers for all requests that wait for the same rows; later ones try again
_MESSAGE = 2**16  # bytes of the longest name and fault
_REASONS = 1024  # faults that are remembered for whoever asks why a request ended


class _ToPlace(ECConnectorMetadata):  # type: ignore[misc]
    """The identifiers of the items whose rows workers put into their encoder caches in a step."""

    def __init__(self, identifiers: list[str]) -> None:
        self.identifiers = identifiers


class CachedRowsConnector(ECConnectorBase):  # type: ignore[misc]
    """vLLM's connector to a cache, in one of its two roles.

    Of ``ec_connector_extra_config`` it takes ``places`` (name -> folder or s3:// prefix), ``held_bytes`` (what each
    worker keeps in memory) and ``row_bytes`` (of one stored row).
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        told, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
        extra = told.ec_connector_extra_config
        address = partial("\0{}-rows-{}-{}".format, told.engine_id, parallel.data_parallel_rank)
        if role == ECConnectorRole.WORKER:
            self._dtype = vllm_config.model_config.dtype
            caches = {name: partial(_opened, place) for name, place in extra["places"].items()}
            self.reader = RowReader(caches, int(extra["held_bytes"]))
            # Of a model in stages the first one takes the rows.
            first = get_pp_group().is_first_rank
            self._answering = Answering(self.reader, address(get_tensor_model_parallel_rank())) if first else None
        else:
            # Half of what a worker keeps is room enough for what is read ahead, and leaves the other half to stay.
            most = int(extra["held_bytes"]) // 2 // max(1, int(extra["row_bytes"]))
            workers = [address(rank) for rank in range(parallel.tensor_parallel_size)]
            self.asking = Asking([connected(worker) for worker in workers], most)

    def shutdown(self) -> None:
        """Close the socket, and read no more."""
        if self.role == ECConnectorRole.SCHEDULER:
            self.asking.close()
        elif self._answering is not None:
            self._answering.close()

    # Of a worker

    def start_load_caches(self, encoder_cache: dict[str, Tensor], **_: object) -> None:
        """Put the rows of this step's items into the encoder cache, decoded on the device."""
        metadata = self._get_connector_metadata()
        for identifier in metadata.identifiers:
            if identifier not in encoder_cache:
                rows = self.reader.find(rows_name(identifier)).result()
                encoder_cache[identifier] = rows.unpacked(current_platform.device_type, self._dtype)

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **_: object) -> None:
        """Save nothing: the cache is written by jobs.prune."""

    # Of the scheduler

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether an item's rows come from a cache."""
        return identifier.startswith(PREFIX)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether every worker holds the rows that a request needs next; ask for them where not."""
        features = request.mm_features
        # Asked about each request in each step; they stand in order, and most requests are behind the last one.
        if not features or (last := features[-1].mm_position).offset + last.length <= num_computed_tokens:
            return True
        ahead = [
            feature
            for feature in features
            if self.has_cache_item(feature.identifier)
            and feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        return self.asking.ready(
            request.request_id, {feature.identifier: feature.mm_position.get_num_embeds() for feature in ahead}
        )

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests whose rows could not be read, once each."""
        return self.asking.take_failed()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Note that the workers put an item of a request into their encoder caches in this step."""
        identifier = request.mm_features[index].identifier
        if self.has_cache_item(identifier):
            self.asking.place(request.request_id, identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """Return what the workers place in this step."""
        return _ToPlace(self.asking.take_placed(scheduler_output.free_encoder_mm_hashes))

    def request_finished(self, request: Request) -> tuple[bool, None]:
        """Forget a request that has ended; nothing of it is kept back."""
        self.asking.forget(request.request_id)
        return False, None


class Asking:
    """The scheduler's side: what each waiting request still needs, and what the workers say that they hold."""

    def __init__(self, workers: Iterable[socket.socket], most: int) -> None:
        """Ask ``workers`` for no more than ``most`` rows ahead, but always for one request's."""
        self._workers = list(workers)
        self._most = most
        self._needs: dict[str, dict[str, int]] = {}  # request -> rows' names -> how many rows
        self._holders: dict[str, set[int]] = {}  # rows' name -> workers that hold them
        self._faults: dict[str, tuple[str, float]] = {}  # rows' name -> why they cannot be read, and until when
        self._placed: set[str] = set()  # items in the workers' encoder caches
        self._to_place: list[str] = []
        self._failed: set[str] = set()
        #: Why requests ended, the last ones.
        self.reasons: dict[str, str] = {}

    def ready(self, request_id: str, items: Mapping[str, int]) -> bool:
        """Return whether a request's items can be placed now: identifier -> rows."""
        missing = {rows_name(item): count for item, count in items.items() if item not in self._placed}
        if not missing:
            return True
        self._hear()
        needs = self._needs.get(request_id, {})
        for name in missing:
            fault, until = self._faults.get(name, ("", 0.0))
            if fault and (name in needs or time.monotonic() < until):
                self._fail(request_id, fault)
                return False
        if new := {name: count for name, count in missing.items() if name not in needs}:
            asked = {name: count for of_one in self._needs.values() for name, count in of_one.items()}
            if (
                asked
                and sum(asked.values()) + sum(count for name, count in new.items() if name not in asked) > self._most
            ):
                return False
            self._needs[request_id] = {**needs, **new}
            for name in new.keys() - asked.keys():
                self._faults.pop(name, None)
                self._holders[name] = set()
                for worker in self._workers:
                    worker.send(name.encode())
            self._hear()
        return all(len(self._holders[name]) == len(self._workers) for name in missing)

    def place(self, request_id: str, item: str) -> None:
        """Let the workers place an item in this step."""
        self._to_place.append(item)
        self._placed.add(item)
        self._drop(request_id, rows_name(item))

    def take_placed(self, freed: Iterable[str]) -> list[str]:
        """Return the items of this step, and forget those that the workers free from their encoder caches in it."""
        self._placed.difference_update(set(freed) - set(self._to_place))
        placed, self._to_place = self._to_place, []
        return placed

    def forget_placed(self) -> None:
        """Note that the workers' encoder caches were emptied."""
        self._placed.clear()

    def take_failed(self) -> set[str]:
        """Return the requests that failed since this was called last."""
        failed, self._failed = self._failed, set()
        return failed

    def forget(self, request_id: str) -> None:
        """Drop what a request still needed."""
        for name in list(self._needs.get(request_id, ())):
            self._drop(request_id, name)

    def close(self) -> None:
        """Close the sockets."""
        for worker in self._workers:
            worker.close()

    def _drop(self, request_id: str, name: str) -> None:
        """Note that a request needs rows no longer."""
        needs = self._needs.get(request_id, {})
        needs.pop(name, None)
        if not needs:
            self._needs.pop(request_id, None)
        if not any(name in of_one for of_one in self._needs.values()):
            self._holders.pop(name, None)

    def _fail(self, request_id: str, fault: str) -> None:
        """Let a request end, and remember why."""
        self.forget(request_id)
        self._failed.add(request_id)
        self.reasons[request_id] = fault
        while len(self.reasons) > _REASONS:
            del self.reasons[next(iter(self.reasons))]

    def _hear(self) -> None:
        """Take in what the workers have said. Raises ConnectionError where one is gone."""
        for number, worker in enumerate(self._workers):
            with suppress(BlockingIOError):
                while True:
                    said = worker.recv(_MESSAGE, socket.MSG_DONTWAIT).decode()
                    if not said:
                        raise ConnectionError("a worker that reads the cache is gone")
                    name, _, fault = said.partition("\n")
                    if fault:
                        self._faults[name] = fault, time.monotonic() + _FAULT_S
                    elif name in self._holders:
                        self._holders[name].add(number)


class Answering:
    """The worker's side of the socket: threads that answer each name with itself once its rows are held."""

    def __init__(self, reader: RowReader, address: str) -> None:
        self._reader = reader
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(address)
        self._socket.listen()
        threading.Thread(target=self._accept, name="row-requests", daemon=True).start()

    def close(self) -> None:
        """Take no further names."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that the thread that waits for connections ends
        self._socket.close()
        self._reader.close()

    def _accept(self) -> None:
        """Serve every connection of this user's processes; runs in a thread."""
        with suppress(OSError):
            while True:
                scheduler, _ = self._socket.accept()
                _, user, _ = struct.unpack("3i", scheduler.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user == os.getuid():
                    threading.Thread(target=self._serve, args=(scheduler,), daemon=True).start()

    def _serve(self, scheduler: socket.socket) -> None:
        """Answer names until the scheduler closes; runs in a thread."""
        with scheduler, suppress(OSError):
            while name := scheduler.recv(_MESSAGE).decode():
                self._reader.find(name).add_done_callback(partial(_tell, scheduler, name))


def _tell(scheduler: socket.socket, name: str, rows: Future[PackedRows]) -> None:
    """Tell the scheduler that rows are held, or why not."""
    error = rows.exception()
    kind = (
        "corrupt" if isinstance(error, CorruptShard) else "unknown-video" if isinstance(error, UnknownVideo) else "io"
    )
    fault = "" if error is None else f"{kind}: {error}"
    with suppress(OSError):
        scheduler.send(f"{name}\n{fault}".encode()[:_MESSAGE])


def rows_name(identifier: str) -> str:
    """Return the name of an item's rows."""
    return identifier.rpartition(SEPARATOR)[0]


def _opened(place: str) -> TokenCache:
    """Return the cache at a place: the one that this process has opened, looked at again, or a new one."""
    return OPENED.get(place) or TokenCache(place)


def connected(address: str) -> socket.socket:
    """Connect to a worker. Raises ValueError where it is on another machine."""
    worker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        worker.connect(address)
    except OSError as error:
        raise ValueError(
            "vLLM's workers must run on the machine of its engine to read a cache by themselves"
        ) from error
    return worker
