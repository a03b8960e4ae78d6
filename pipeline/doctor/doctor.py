"""All checks in order, from what takes a moment to what takes a minute; the page of ``jobs.doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from pipeline.doctor.decoding import check_balance, check_decoding, first_videos
from pipeline.doctor.device import DeviceReport, check_device, check_links
from pipeline.doctor.finding import Finding, guarded
from pipeline.doctor.nodes import Node, alive_nodes, clock_skews, judge_nodes, look_here, on_each_node, silent_node
from pipeline.doctor.positions import check_positions
from pipeline.doctor.store import check_store, reachable
from pipeline.doctor.vllm import check_vllm
from pipeline.errors import UsageError
from pipeline.execution.cluster import connect
from pipeline.prune.config import PruneConfig
from pipeline.prune.one_video import request_of
from pipeline.prune.request import PruneRequest
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

_VIDEOS = 8  # videos that are decoded
_DEVICE_S = 400.0  # seconds to load the model, compile the kernels and encode


def examine(config: PruneConfig, say: Callable[[str], object]) -> Iterator[Finding]:
    """Yield the findings of all checks for the run that ``config`` describes, each as soon as known. Raises nothing.

    It starts Ray, or joins the cluster, as the run would.
    """
    cluster: dict[str, float] = {}
    yield from guarded("ray", lambda: _ray(cluster, config.device, say))
    if cluster:
        say("looking at every node")
        yield from guarded("nodes", _nodes)
    yield from _store(config, bool(cluster))
    request, decode_s, encode_s = None, list[float](), None
    try:
        request = request_of(config)
        yield Finding("model", "ok", f"{config.model}: {request.source.model_type}, {request.source.identity}")
    except UsageError as error:
        remedy = "name a folder or a Hugging Face id that is cached or can be reached (HF_TOKEN, HF_HUB_OFFLINE)"
        yield Finding("model", "wrong", str(error), remedy)
    if request is not None:
        yield from guarded("positions", partial(check_positions, request.source, request.sampling))
    if request is not None and cluster:
        say("decoding some of the videos")
        yield from guarded("decoding", partial(_decoding, config, request, decode_s))
        say("encoding on the device")
        reports = _devices(config, request, cluster)
        for report in reports:
            yield from report.findings
        yield from _links(config.device)
        encode_s = next((report.encode_s for report in reports if report.encode_s is not None), None)
    yield check_balance(
        median(decode_s) if decode_s else None, encode_s, cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    )
    say("asking vLLM, where it is installed")
    yield from guarded("vllm", check_vllm)


def _ray(cluster: dict[str, float], device: str, say: Callable[[str], object]) -> Iterator[Finding]:
    """Start or join Ray and yield a finding about its nodes; the cluster's resources are added to ``cluster``."""
    cluster.update(connect(say))
    nodes = len(list(alive_nodes()))
    says = f"{nodes} node{'' if nodes == 1 else 's'}, {cluster.get('CPU', 0):g} CPUs, {cluster.get('GPU', 0):g} GPUs"
    if device == "cuda" and cluster.get("GPU", 0) < 1:
        yield Finding("ray", "wrong", f"--device cuda, but {says}", "join nodes with GPUs, or use --device auto")
    else:
        yield Finding("ray", "ok", says)


def _nodes() -> Iterator[Finding]:
    """Gather facts and clock skews of every node, and yield findings about them."""
    nodes = on_each_node(look_here, silent_node)
    skews = clock_skews()
    placed = {
        host: node._replace(skew_s=skews.get(host, 0.0)) if isinstance(node, Node) else node
        for host, node in nodes.items()
    }
    yield from judge_nodes(placed, look_here())


def _store(config: PruneConfig, in_cluster: bool) -> Iterator[Finding]:
    """Try the store from here, and from each node of a cluster that has several."""
    try:
        store = reachable(store_at(config.out, Objects.from_environment(config.s3_endpoint, config.s3_region)))
    except UsageError as error:
        yield Finding("store", "wrong", str(error), "name a folder or s3://bucket/prefix")
        return
    yield from guarded("store", lambda: check_store(store))
    if in_cluster and len(list(alive_nodes())) > 1:

        def failed(cause: str) -> list[Finding]:
            return [Finding("store", "wrong", f"it cannot be tried there: {cause}", "look at that node")]

        for host, found in on_each_node(lambda: list(check_store(store)), failed).items():
            yield from (one.on(host) for one in found)


def _decoding(config: PruneConfig, request: PruneRequest, decode_s: list[float]) -> Iterator[Finding]:
    """Read the first videos and yield the findings of decoding them."""
    yield from check_decoding(request.decode_setup(), first_videos(config, request.objects, _VIDEOS), decode_s)


def _links(device: str) -> Iterator[Finding]:
    """Measure copies between two GPUs of each node that has several; without such a node yield nothing."""
    if device != "cpu" and any(has.get("GPU", 0.0) >= 2 for _, _, has in alive_nodes()):
        found = on_each_node(check_links, partial(_not_looked_at, "links"), gpus=2)
        yield from (one.on(host) for host, one in found.items())


def _devices(config: PruneConfig, request: PruneRequest, cluster: dict[str, float]) -> list[DeviceReport]:
    """Check a GPU of each node that has one; without any, the CPUs of each node, as an encoder would use them."""
    shape = request.decode_setup().largest_frames()
    work = partial(check_device, request.encode_setup(config.device, "auto"), shape)
    on_gpus = config.device != "cpu" and cluster.get("GPU", 0.0) >= 1

    def failed(cause: str) -> DeviceReport:
        return DeviceReport([_not_looked_at("device", cause)], None)

    reports = on_each_node(work, failed, gpus=int(on_gpus), wait_s=_DEVICE_S)
    return [
        DeviceReport([one.on(host) for one in report.findings], report.encode_s) for host, report in reports.items()
    ]


def _not_looked_at(name: str, cause: str) -> Finding:
    """Return the finding about a device that could not be looked at."""
    return Finding(name, "wrong", cause, "look at that node and its driver")
