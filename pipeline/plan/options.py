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
        False, "forecast time, cost, bytes and the bottleneck: touches nothing, needs no GPU", group=GROUP
    )
    simulate: bool = option(False, "with --plan: simulate the stages too, event by event (needs simpy: the extra plan)")
    html: str | None = option(None, "with --plan: write it as a page too", metavar="FILE")
    gpus: int | None = option(None, "with --plan: for N GPUs, or 0 (default: those of this machine)", metavar="N")
    gpu_type: str | None = option(None, f"with --plan: one of {', '.join(GPU_TYPES)}", metavar="TYPE")
    decode_cores: int | None = option(
        None, "with --plan: N vCPUs decode (default: those usual beside a GPU)", metavar="N"
    )
    gpu_hour: float | None = option(None, "price of a GPU-hour, with the CPUs beside it", metavar="PRICE")
    core_hour: float | None = option(None, "price of a vCPU-hour, where CPUs are paid by themselves", metavar="PRICE")
    gb_month: float = option(0.023, "price of storing a GB (10^9 bytes) for a month", metavar="PRICE")
    months: float = option(1.0, "months for which the cache is kept", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gpu_hour", "core_hour", "gb_month", "months", "decode_cores"):
            value = getattr(self, name)
            check(value is None or positive(value), name, "a positive number", value)
        check(self.gpus is None or self.gpus >= 0, "gpus", "at least 0", self.gpus)
        check(self.gpu_type in (None, *GPU_TYPES), "gpu_type", f"one of {', '.join(GPU_TYPES)}", self.gpu_type)
        if self.gpu_type is not None and self.gpus == 0:
            raise UsageError(f"--gpu-type {self.gpu_type} and --gpus 0 do not go together")
        self.refuse_without_plan("simulate", "html", "gpus", "gpu_type", "decode_cores")
        if self.simulate and find_spec("simpy") is None:
            raise UsageError("--simulate needs simpy: pip install simpy")

    @property
    @abstractmethod
    def subject(self) -> str:
        """What is planned, as the title of a page."""

    def refuse_without_plan(self, *names: str) -> None:
        """Raise UsageError where one of these options is given without ``--plan``."""
        flags = {item.name: item.metadata.get("flag", "--" + item.name.replace("_", "-")) for item in fields(self)}
        for name in names:
            value = getattr(self, name)
            if not self.plan and value is not None and value is not False:
                raise UsageError(f"{flags[name]} goes with --plan")
