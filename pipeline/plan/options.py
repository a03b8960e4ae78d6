"""The options of plans, shared by the commands that have ``--plan``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from importlib.util import find_spec

from pipeline.errors import UsageError
from pipeline.options import RunOptions, check, option, positive
from pipeline.plan.gpus import GPU_TYPES

GROUP = "plan"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """The options of a plan, and of the cluster and the prices that it reckons with."""

    plan: bool = option(
        False,
        "forecast time, cost and bytes of a run, and its bottleneck; touches nothing and needs no GPU",
        group=GROUP,
    )
    simulate: bool = option(
        False, "with --plan: simulate the stages too, event by event (needs simpy: pip install -e '.[plan]')"
    )
    html: str | None = option(None, "with --plan: write it as a page too", metavar="FILE")
    gpus: int | None = option(None, "with --plan: for N GPUs, or 0 (default: those of this machine)", metavar="N")
    gpu_type: str | None = option(None, f"with --plan: one of {', '.join(GPU_TYPES)}", metavar="TYPE")
    decode_cores: int | None = option(
        None, "with --plan: vCPUs that decode (default: those usual beside the GPUs, else this machine's)", metavar="N"
    )
    gpu_hour: float | None = option(None, "price of a GPU-hour, with the CPUs beside it", metavar="PRICE")
    core_hour: float | None = option(None, "price of a vCPU-hour, where CPUs are paid by themselves", metavar="PRICE")
    gb_month: float = option(0.023, "price of storing a GB (10^9 bytes) for a month", metavar="PRICE")
    months: float = option(1.0, "months for which the cache is kept", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gpu_hour", "core_hour"):
            price = getattr(self, name)
            check(price is None or positive(price), name, "a positive price", price)
        for name in ("gb_month", "months"):
            check(positive(getattr(self, name)), name, "a positive number", getattr(self, name))
        check(self.gpus is None or self.gpus >= 0, "gpus", "at least 0", self.gpus)
        check(self.decode_cores is None or self.decode_cores >= 1, "decode_cores", "at least 1", self.decode_cores)
        known = self.gpu_type is None or self.gpu_type in GPU_TYPES
        check(known, "gpu_type", f"one of {', '.join(GPU_TYPES)}", self.gpu_type)
        if self.gpu_type is not None and self.gpus == 0:
            raise UsageError(f"--gpu-type {self.gpu_type} and --gpus 0 do not go together")
        if self.simulate and find_spec("simpy") is None:
            raise UsageError("--simulate needs simpy: pip install simpy")
        self.refuse_without_plan("html", "gpus", "gpu_type", "decode_cores")

    @property
    @abstractmethod
    def subject(self) -> str:
        """What is planned, as the title of a page."""

    def refuse_without_plan(self, *names: str) -> None:
        """Raise UsageError where one of these options is given without ``--plan``."""
        flags = {item.name: item.metadata.get("flag", "--" + item.name.replace("_", "-")) for item in fields(self)}
        for name in names:
            if not self.plan and getattr(self, name) is not None:
                raise UsageError(f"{flags[name]} goes with --plan")
