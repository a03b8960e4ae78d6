"""The job of a prune run: workers planned for the cluster as it is, and the graph that they form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

from ray.actor import ActorHandle

from pipeline.prune.config import PruneConfig
from pipeline.prune.facts import Facts
from pipeline.prune.graph import build_graph
from pipeline.prune.recipe import PruneStages
from pipeline.prune.request import Request
from pipeline.prune.resources import PRUNING, Resources, list_shortfalls, plan_workers, total_file_bytes
from pipeline.prune.todo import Todo
from pipeline.runner.job import Job
from pipeline.runner.run_record import RunFile
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import Plan


class PruneJob(Job[Todo]):
    """The work of a prune run: decode, encode and prune videos, and write their tokens.

    Args:
        request: names the options and the cache.
        stages: the settings of the workers.
        run_id: the run of the token shards that workers write.
        record: gets the latest plan.
        facts: gets the number of encoders of each plan.
    """

    wording = PRUNING
    options: PruneConfig

    def __init__(self, request: Request, stages: PruneStages, run_id: str, record: RunFile, facts: Facts) -> None:
        super().__init__(request.config, request.console)
        self._request, self._stages, self._run_id, self._record, self._facts = request, stages, run_id, record, facts
        self._todo: Todo | None = None  # of the last plan
        self._total_file_bytes = math.inf

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        on_gpus = self._stages.encode.device == "cuda"
        return super().can_run_on(cluster) and (not on_gpus or cluster.get("GPU", 0.0) >= 1)

    def plan(self, items: Todo) -> Resources:
        """Plan the workers for the cluster as it is now, say what is short, and record the plan.

        Raises RunFailed if no node is left that the run needs.
        """
        cluster = self.require_resources()
        n_videos, self._todo = items.estimate_count(), items
        self._total_file_bytes = math.inf if items.n_left else total_file_bytes(items.list_todo())
        uncapped, plan = self._plan_workers(cluster, n_videos)
        for note in list_shortfalls(self.options, uncapped, plan, n_videos):
            self.say(f"note: {note}")
        self._facts.set_encoders(plan.encode.workers)
        self._record.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def replan(self, n_items: int) -> Resources | None:
        if self._todo is None or not self._todo.is_complete:  # the number of videos is unknown
            return None
        return self._plan_workers(self.available_resources(), n_items)[1]

    def _plan_workers(self, cluster: Mapping[str, float], n_videos: int) -> tuple[Resources, Resources]:
        """Plan the workers as ``plan_workers`` does; units of work are whole row groups of tables of videos."""
        uncapped, plan = plan_workers(self.options, self._stages, cluster, n_videos, self._total_file_bytes)
        return uncapped, replace(plan, rows_per_group=self._request.videos.indexes.rows_per_group)

    def graph(self, items: Todo, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the graph of the plan, which must be a ``Resources``, without the excluded nodes."""
        assert isinstance(plan, Resources)
        decode, encode, store = self._stages.decode, self._stages.encode, self._request.store
        return build_graph(items, decode, encode, plan, store, self._run_id, heartbeats, without=self.excluded_nodes)
