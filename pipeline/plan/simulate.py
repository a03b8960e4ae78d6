"""A simulation of a run's stages, event by event: queues that fill, shared cores, slow workers, nodes that are lost.

Needs simpy (``pip install -e '.[plan]'``). Every block passes decoders, the driver, encoders and writers as in
``pipeline.prune.graph``; its README has the table of measured runs that it is held to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.plan.estimate import LOSS, Cluster, seconds_of
from pipeline.plan.workload import Workload

if TYPE_CHECKING:
    import simpy

    Steps = Generator["simpy.Event", Any, None]

_BLOCKS = 1500  # besides four for each decoder: a run of more blocks goes on at the pace of these
_SLICES, _SLICE_S = 10, 0.05  # a core is given up so often during a video, so that the driver need not wait
_IN_FLIGHT = 4  # bundles on their way to an encoder


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The workers of a run and what a video costs at each, in seconds.

    Attributes:
        bundle: videos that travel together.
        cores: of all nodes; decoders, the rest of the hosts and the driver share them.
        decode_s, encode_s, host_s, driver_s: of a video; encoders take no cores, as GPUs do not.
        vary: how far decoding of single videos strays, as the sigma of a log-normal.
        slow: share of decoders that take twice as long.
        lost: node -> second at which it is lost; what it had in hand is done again after ``notice_s``.
    """

    videos: int
    decoders: int
    encoders: int
    cores: float
    decode_s: float
    encode_s: float
    host_s: float
    driver_s: float
    nodes: int = 1
    bundle: int = 1
    vary: float = 0.3
    slow: float = 0.0
    lost: Mapping[int, float] = field(default_factory=dict)
    notice_s: float = 30.0
    seed: int = 0


def simulate(stages: Stages) -> float:
    """Return the seconds from the first video to the last. The same stages and seed give the same time."""
    return _Run(stages).seconds()


def simulated_s(work: Workload, cluster: Cluster) -> float:
    """Return the wall time of a planned run, of whose blocks only as many are simulated as tell its pace."""
    one, gpus = seconds_of(work, cluster), cluster.gpus
    cpus = 0.0 if gpus else one.encode.expected  # without a GPU an encoder takes cores as a decoder does
    decoders, encoders = max(1, int(cluster.cores)), gpus or max(1, int(cluster.cores // 4))
    most = work.videos // (16 * (decoders + encoders))
    stages = Stages(
        videos=work.videos,
        decoders=decoders,
        encoders=encoders,
        cores=cluster.cores,
        decode_s=one.decode.expected + cpus,
        encode_s=one.encode.expected - cpus,
        host_s=one.host.expected,
        driver_s=one.driver.expected,
        bundle=max(1, min(work.bundle, most)),
    )
    few = (_BLOCKS + 4 * decoders) * stages.bundle
    if work.videos <= 3 * few:
        return cluster.start_s.expected + simulate(stages) if work.videos else 0.0
    first, more = simulate(replace(stages, videos=few)), simulate(replace(stages, videos=3 * few))
    return cluster.start_s.expected + (first + (more - first) / (2 * few) * (work.videos - few)) * LOSS.expected


class _Run:
    """The state of a simulated run."""

    def __init__(self, stages: Stages) -> None:
        import simpy  # noqa: PLC0415 - an extra, of which a plan can do without

        self.stages, self.env = stages, simpy.Environment()
        self.random, self.left = random.Random(stages.seed), stages.videos
        self.ended = self.env.event()
        self.cores = simpy.Resource(self.env, max(1, round(stages.cores)))
        self.source = simpy.Store(self.env)
        self.decoded = simpy.Store(self.env, 4 * stages.decoders)
        self.ready = simpy.Store(self.env, _IN_FLIGHT * stages.encoders)
        for first in range(0, stages.videos, stages.bundle):
            self.source.put(min(stages.bundle, stages.videos - first))

    def seconds(self) -> float:
        """Run all steps until the last video is through."""
        stages, env = self.stages, self.env
        for place in range(stages.decoders):
            env.process(self.decode(place % stages.nodes, 2.0 if place < stages.slow * stages.decoders else 1.0))
        for place in range(stages.encoders):
            env.process(self.encode(place % stages.nodes))
        env.process(self.drive())
        env.run(self.ended)
        return float(env.now)

    def compute(self, seconds: float) -> Steps:
        """Take a core for so long, in slices."""
        piece = max(_SLICE_S, seconds / _SLICES)
        while seconds > 0:
            with self.cores.request() as core:
                yield core
                yield self.env.timeout(min(piece, seconds))
            seconds -= piece

    def decode(self, node: int, slower: float) -> Steps:
        """Decode bundles until the node is lost."""
        while True:
            size = yield self.source.get()
            vary = self.stages.vary
            factors = (self.random.lognormvariate(-(vary**2) / 2, vary) for _ in range(size))
            yield from self.compute(slower * self.stages.decode_s * sum(factors))
            if self.is_lost(node):
                return (yield from self.again(size))
            yield self.decoded.put(size)

    def drive(self) -> Steps:
        """Hand decoded bundles to encoders, one at a time."""
        while True:
            size = yield self.decoded.get()
            yield from self.compute(self.stages.driver_s * size)
            yield self.ready.put(size)

    def encode(self, node: int) -> Steps:
        """Encode bundles until the node is lost; the rest of a video's host work goes on beside the next one."""
        while True:
            size = yield self.ready.get()
            yield self.env.timeout(size * self.stages.encode_s)
            if self.is_lost(node):
                return (yield from self.again(size))
            self.env.process(self.serve(size))

    def serve(self, size: int) -> Steps:
        """Take a core for the rest of a bundle's host work; end the run with the last one."""
        yield from self.compute(size * self.stages.host_s)
        self.left -= size
        if not self.left:
            self.ended.succeed()

    def is_lost(self, node: int) -> bool:
        """Return whether a node is lost by now."""
        return bool(self.env.now >= self.stages.lost.get(node, math.inf))

    def again(self, size: int) -> Steps:
        """Give a bundle of a lost node back, once that is noticed."""
        yield self.env.timeout(self.stages.notice_s)
        yield self.source.put(size)
