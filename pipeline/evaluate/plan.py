"""The plan of an evaluation: encoding each video once, late pruning, and answering every question under each method."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from pipeline.cache.ledger import Ledger
from pipeline.cache.reader import made_with
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.request import EvaluateRequest, data_folder, prepare
from pipeline.evaluate.run import answers_config
from pipeline.plan.estimate import HOUR, PAYS, STEP_S, Cluster, Plan, Prices, estimate
from pipeline.plan.gpus import GPU_TYPES
from pipeline.plan.intervals import NONE, Interval, mean_of, product, spread, total
from pipeline.plan.workload import Workload, selecting
from pipeline.prune.config import PruneConfig
from pipeline.prune.forecast import planned_cluster, planned_work
from pipeline.storage.stores import store_at

_TEXT_TOKENS = Interval(60, 120, 400)  # of a question with its options and the template
# Questions that share a pass over the weights for each new token, and the bytes of a weight.
_BATCH, _WEIGHT_BYTES = 8, 2
_PLANNED = ("plan", "gpus", "gpu_type", "decode_cores", "gpu_hour", "core_hour", "gb_month", "months")


def plan_evaluation(config: EvaluateConfig, console: Console) -> Plan:
    """Estimate an evaluation with the same flags; decodes the probed videos, starts and writes nothing.

    Raises UsageError for whatever an evaluation would refuse before it starts.
    """
    request = prepare(config, console)
    cluster, notes = planned_cluster(config, config.device)
    work, prices, n_arms = _videos(request, console), Prices.of(config), len(request.grid)
    plan, models = estimate(work, cluster, prices, notes), cluster.gpus or cluster.cores
    prune, answer = _pruning(request, work, cluster), _answering(request, work, cluster)
    stages = {**plan.stage_s, "prune": prune.scaled(1 / models), "answer": answer.scaled(1 / models)}
    wall = total(plan.wall_s, cluster.start_s, stages["prune"], stages["answer"])
    hourly, slowest = prices.per_hour(cluster), max(stages, key=lambda name: stages[name].expected)
    said = f"{len(request.questions)} questions under {n_arms} prunings, {len(request.questions) * n_arms} answers"
    return replace(
        plan,
        wall_s=wall,
        stage_s=stages,
        gpu_s=total(plan.gpu_s, prune, answer) if cluster.gpus else NONE,
        parts_s={"encode": plan.gpu_s if cluster.gpus else plan.encode_core_s, "prune": prune, "answer": answer},
        bottleneck=slowest,
        remedy=plan.remedy if slowest in plan.stage_s else "more GPUs, or fewer methods and ratios",
        encoder_busy=plan.encoder_busy.scaled(plan.wall_s.expected / wall.expected),
        break_even_questions=None,
        cost=None if hourly is None else {"total": wall.scaled(hourly / HOUR)},
        notes=(
            f"{said}, as if none were there; answering is counted, not measured",
            *(["--simulate is not for evaluations: nothing was simulated"] if config.simulate else []),
            *(note for note in plan.notes if not note.startswith(PAYS)),
        ),
    )


def _videos(request: EvaluateRequest, console: Console) -> Workload:
    """Return the work of encoding the videos that are not cached, all tokens of each."""
    if request.videos is not None:
        folder, planned = data_folder(request), {name: getattr(request.config, name) for name in _PLANNED}
        rows = {row["video_id"]: row for item in request.loaded.items for row in item.manifest_rows(folder)}
        return planned_work(PruneConfig(**{**vars(request.videos), **planned}), console, list(rows.values()))
    cache = store_at(request.cache, request.objects)
    ledger = Ledger(cache, made_with(cache)).refresh()
    tokens = mean_of(ledger.columns["n_total"][ledger.columns["state"] == 1].astype(float).tolist(), 0.0)
    return Workload(videos=0, tokens=(tokens, tokens), notes=("every video is cached",))


def _pruning(request: EvaluateRequest, work: Workload, cluster: Cluster) -> Interval:
    """Estimate the seconds of pruning the tokens of every question under each method, on a GPU or on a core."""
    parts = [NONE]
    for arm in request.grid.values():
        if arm is None:
            continue
        steps = product(work.tokens[0], STEP_S).scaled(arm.retention_ratio)
        on_core = selecting(arm.method, work.tokens[0].expected, _text(request).get("hidden_size", 3584))
        parts.append((steps if cluster.gpus else on_core).scaled(len(request.questions)))
    return total(*parts)


def _answering(request: EvaluateRequest, work: Workload, cluster: Cluster) -> Interval:
    """Estimate the seconds of answering every question under each method, on a GPU or on a core.

    The prompt passes the language model at once; each new token reads all weights, for some questions together.
    """
    text = _text(request)
    D, inner, layers = (text.get(name, usual) for name, usual in _TEXT_DEFAULTS)
    kv = D * text.get("num_key_value_heads", 4) // text.get("num_attention_heads", 28)
    weights = layers * (2 * D**2 + 2 * D * kv + 3 * D * inner)
    new_tokens = max(0, answers_config(request).max_new_tokens - 1)
    read_s = weights * _WEIGHT_BYTES / GPU_TYPES[cluster.gpu_type].bandwidth / _BATCH if cluster.gpu_type else 0.0
    n_new = 0 if cluster.gpu_type else new_tokens

    def answered(ratio: float) -> Interval:
        def operations(tokens: float, words: float) -> float:
            length = ratio * tokens + words
            return 2 * weights * (length + n_new) + 2 * layers * D * length**2

        computed = product(spread(operations, work.tokens[0], _TEXT_TOKENS), cluster.seconds_an_operation())
        return total(computed, Interval.exactly(new_tokens * read_s)).scaled(len(request.questions))

    return total(*(answered(1.0 if arm is None else arm.retention_ratio) for arm in request.grid.values()))


_TEXT_DEFAULTS = (("hidden_size", 3584), ("intermediate_size", 18944), ("num_hidden_layers", 28))


def _text(request: EvaluateRequest) -> dict[str, int]:
    """Return the sizes in config.json of the language model, which on Qwen2.5-VL has no part of its own there."""
    config = request.source.config
    return {name: value for name, value in config.get("text_config", config).items() if isinstance(value, int)}
