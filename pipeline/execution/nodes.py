"""The nodes of the cluster: where work failed, and what is there without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import ray

from pipeline.execution.heartbeat import Tried

NODE_LABEL = "ray.io/node-id"  # that Ray itself gives every node


def troubled(tried: Mapping[str, Mapping[str, Tried]]) -> dict[str, str]:
    """Node id -> host, of nodes on which a stage failed more often than on all of them together.

    A file that is missing for all fails everywhere alike, so a node is never left out where no other one does better.
    """
    found: dict[str, str] = {}
    for nodes in tried.values():
        n_failed = sum(node.failed for node in nodes.values())
        n_all = n_failed + sum(node.done for node in nodes.values())
        for name, node in nodes.items():
            if node.failed * n_all > n_failed * (node.failed + node.done):
                found[name] = node.host
    return found


def resources_without(nodes: Collection[str]) -> dict[str, float]:
    """What the living nodes have but these."""
    there: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in nodes:
            there.update(node["Resources"])
    return dict(there)


def elsewhere(nodes: Collection[str]) -> dict[str, str]:
    """The label selector of workers that must not run on these nodes."""
    return {NODE_LABEL: f"!in({','.join(sorted(nodes))})"} if nodes else {}
