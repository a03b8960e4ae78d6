"""The checks in order, fast ones first: Ray, nodes, store, model, settings, decoding, encoding, their balance."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from gstep.backbones import ModelSource, find_family
from gstep.families import describe_family
from gstep.lazy import load_object
from pipeline.doctor.finding import Finding, run_guarded
from pipeline.doctor.nodes import judge_nodes, measure_node, measure_nodes, run_on_each_node
from pipeline.doctor.speed import check_balance, check_decoding, check_device, read_first_videos
from pipeline.errors import convert_usage_errors, format_count
from pipeline.prune.config import PruneConfig
from pipeline.prune.frame_limits import describe_sampling
from pipeline.prune.recipe import Recipe, make_sampling_identity, resolve_recipe
from pipeline.runner.cluster.connection import connect
from pipeline.runner.cluster.nodes import iter_alive_nodes
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, Store, store_at

_VIDEOS, _VIDEOS_PER_NODE = 8, 2  # videos that are decoded here, and on every node
_STORED_VIDEOS = 4  # videos whose frames an object store should have room for
_DEVICE_S = 400.0  # for loading the model, compiling the kernels and encoding
_TEST_FILE_BYTES, _SLOW_STORE_S = 8 * 2**20, 2.0  # bytes of a test file, and the seconds above which a store is slow
_MAX_STORE_SKEW_S = 5.0


class Doctor:
    """The checks for the run that ``config`` describes. ``say`` gets a progress line before a slow check."""

    def __init__(self, config: PruneConfig, say: Callable[[str], object]) -> None:
        """Keep the arguments."""
        self._config = config
        self._say = say
        self._cluster: dict[str, float] = {}
        self._source: ModelSource | None = None
        self._recipe: Recipe | None = None
        self._decode_s: float | None = None
        self._encode_s: float | None = None

    def iter_findings(self) -> Iterator[Finding]:
        """Run all checks, and yield each finding as soon as it is known.

        This starts Ray or joins a cluster as the run would. An exception in a check becomes a "wrong" finding; checks
        that need a failed one are skipped or "unknown".
        """
        yield from run_guarded("ray", self._check_ray)
        if self._cluster:
            self._say("looking at every node")
            yield from run_guarded("nodes", lambda: judge_nodes(measure_nodes(), measure_node()))
        yield from run_guarded("store", self._check_store)
        yield from run_guarded("model", self._check_model)
        if self._source is None:
            yield Finding("settings", "unknown", "not checked: they need a model")
        else:
            yield from run_guarded("settings", self._check_settings)
        if self._recipe is not None and self._cluster:
            self._say("decoding some of the videos")
            yield from run_guarded("decoding", partial(self._check_decoding, self._recipe))
            self._say("encoding on the device")
            yield from run_guarded("encode", partial(self._check_devices, self._recipe))
        cores, gpus = self._cluster.get("CPU", 0.0), self._cluster.get("GPU", 0.0)
        yield check_balance(self._decode_s, self._encode_s, cores, gpus)

    def _check_ray(self) -> Iterator[Finding]:
        """Start or join Ray, keep its resources, and yield the numbers of nodes, CPUs and GPUs.

        The finding is "wrong" for device "cuda" without a GPU.
        """
        self._cluster = connect(self._say)
        cpus, gpus = self._cluster.get("CPU", 0), self._cluster.get("GPU", 0)
        nodes = len(list(iter_alive_nodes()))
        says = f"{format_count(nodes, 'node')}, {cpus:g} CPUs, {gpus:g} GPUs"
        if self._config.device == "cuda" and gpus < 1:
            yield Finding("ray", "wrong", f"--device cuda, but {says}", "join nodes with GPUs, or use --device auto")
        else:
            yield Finding("ray", "ok", says)

    def _check_store(self) -> Iterator[Finding]:
        """Test the store (or the folder in which it would be made) from here, and from each of several nodes."""
        objects = Objects.from_environment(self._config.s3_endpoint, self._config.s3_requester_pays)
        store = find_existing_store(store_at(self._config.out, objects))
        yield from check_store(store)
        if not self._cluster or len(list(iter_alive_nodes())) < 2:
            return
        for host, result in run_on_each_node(lambda: list(check_store(store))).items():
            yield from (finding.with_host(host) for finding in ([result] if isinstance(result, Finding) else result))

    def _check_model(self) -> Iterator[Finding]:
        """Find the model's files, keep the source, and compare it with the stock model if its family can.

        Yields a finding "model", then "parity", which is "unknown" without a comparison. UsageError is raised if the
        model cannot be found, or is not supported.
        """
        config = self._config
        with convert_usage_errors():
            source = ModelSource.resolve(
                config.model, config.revision, quantized=True, family=config.family, gate=False
            )
            check = find_family(source.family).doctor
        kind = describe_family(source.family, source.model_type)
        yield Finding("model", "ok", f"{config.model}: config.json is of {kind}; {source.identity}")
        self._source = source
        if check is None:
            says = f"not checked: the family {source.family} brings no comparison with the stock model"
            yield Finding("parity", "unknown", says)
            return
        self._say("comparing the model's answers from cached tokens with its own")
        yield Finding("parity", *load_object(check)(source))

    def _check_settings(self) -> Iterator[Finding]:
        """Resolve the options as a run does, keep the recipe, and yield "ok". UsageError is raised as in a run."""
        self._recipe = recipe = resolve_recipe(self._config)
        frames = describe_sampling(make_sampling_identity(recipe.sampling))
        kept = f"{recipe.method} at retention ratio {recipe.retention_ratio:g}"
        yield Finding("settings", "ok", f"model, frames and method go together: {frames}; {kept}")

    def _check_decoding(self, recipe: Recipe) -> Iterator[Finding]:
        """Decode the first 8 videos here, and 2 of them on every node of a cluster with several.

        Also yields, per node, whether its object store holds the frames of 4 videos. Keeps the core-seconds measured
        here. UsageError is raised if there are no videos.
        """
        rows = read_first_videos(self._config, recipe.objects, _VIDEOS)
        setup = recipe.make_decode_setup()
        findings, self._decode_s = check_decoding(setup, rows)
        yield from findings
        nodes = list(iter_alive_nodes())
        n_frames, height, width = shape = setup.plan_largest_frames()
        frame_bytes = 3 * math.prod(shape)
        for host, _, resources in nodes:
            store_bytes = resources.get("object_store_memory", 0.0)
            capacity = (
                f"{format_count(int(store_bytes / frame_bytes), 'video')} of {n_frames} frames of {width}x{height}"
            )
            says = f"{store_bytes / 2**30:.1f} GiB, which is room for {capacity}"
            remedy = "start the node with a larger --object-store-memory: Ray spills frames to its disk"
            yield Finding.warn_if_slow(
                store_bytes < _STORED_VIDEOS * frame_bytes, "object store", says, remedy
            ).with_host(host)
        if len(nodes) < 2:
            return
        for host, report in run_on_each_node(partial(check_decoding, setup, rows[:_VIDEOS_PER_NODE])).items():
            yield from (finding.with_host(host) for finding in ([report] if isinstance(report, Finding) else report[0]))

    def _check_devices(self, recipe: Recipe) -> Iterator[Finding]:
        """Encode on a GPU of each node that has one; if there is none to use, on the CPUs of each node.

        Keeps the encode seconds of the first node that reports any.
        """
        setup = recipe.make_encode_setup(self._config.device, "auto")
        shape = recipe.make_decode_setup().plan_largest_frames()
        on_gpus = int(self._config.device != "cpu" and self._cluster.get("GPU", 0.0) >= 1)
        reports = run_on_each_node(partial(check_device, setup, shape), gpus=on_gpus, wait_s=_DEVICE_S)
        for host, report in reports.items():
            if isinstance(report, Finding):
                yield report.with_host(host)
                continue
            findings, encode_s = report
            self._encode_s = encode_s if self._encode_s is None else self._encode_s
            yield from (finding.with_host(host) for finding in findings)


def find_existing_store(store: Store) -> Store:
    """Return the store; for a missing local folder, the nearest existing folder above it."""
    if store.folder is not None and not store.folder.exists():
        return LocalStore(next(path for path in store.folder.parents if path.exists()))
    return store


def check_store(store: Store) -> Iterator[Finding]:
    """Put, list, read and delete a test file of 8 MiB; yield one finding.

    It is "wrong" after an OSError, for wrong data or a wrong listing, if the deleted file still exists, and if the
    store's clock is off by more than 5 s; "slow" if writing or reading takes more than 2 s.
    """
    name = f".doctor-{secrets.token_hex(6)}"
    data = secrets.token_bytes(_TEST_FILE_BYTES)
    problems = []
    try:
        put_at = time.perf_counter()
        store.put(name, data)
        put_s = time.perf_counter() - put_at
        try:
            if name not in {Path(file.name).name for file in store.list_files("")}:
                problems.append("a file that was put is not in the listing")
            middle = store.read_slice(name, 1000, 3000).data
            start = time.perf_counter()
            whole = store.read(name)
            read_s = time.perf_counter() - start
            if middle != data[1000:3000] or whole != data:
                problems.append("what is read is not what was put")
            age_s = store.compute_age(name).total_seconds()
            if not -_MAX_STORE_SKEW_S <= age_s <= _MAX_STORE_SKEW_S + time.perf_counter() - put_at:
                problems.append(f"its clock is wrong: a file just put is {age_s:.0f} s old")
        finally:
            store.delete(name)
        if store.exists(name):
            problems.append("a file that was deleted is still there")
    except OSError as error:
        says = f"{error.filename or store}: {error.strerror or error}"
        yield Finding("store", "wrong", says, "check that the place exists, the credentials, and --s3-endpoint")
        return
    if problems:
        yield Finding("store", "wrong", f"{store}: {'; '.join(problems)}", "use another store: a cache would lose rows")
        return
    timings = f"put in {put_s:.2f} s, listed, read in {read_s:.2f} s, read in part and deleted"
    says = f"{store}: a test file of {_TEST_FILE_BYTES >> 20} MiB was {timings}"
    yield Finding.warn_if_slow(max(put_s, read_s) > _SLOW_STORE_S, "store", says, "use a store nearer to the workers")
