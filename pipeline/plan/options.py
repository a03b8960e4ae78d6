"""The command-line options of a plan."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import UsageError
from pipeline.options import RunOptions, check, is_positive, option, parse_named_values
from pipeline.plan.estimate import GPU_TYPES, Prices

_FULL_HD = "1920x1080"
_PLAN_FIELDS = (
    *("probe", "gpus", "gpu_type", "decode_cores"),
    *("corpus_videos", "seconds", "size"),
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """The options of a plan: the videos, the cluster and the prices that it assumes. Invalid ones raise UsageError."""

    plan: bool = option(
        False, "forecast time, cost, bytes and the bottleneck: writes nothing, needs no GPU", group="plan"
    )
    probe: int | None = option(None, "with --plan: decode K of the videos (default: 20)", metavar="K")
    gpus: int | None = option(
        None, "with --plan: plan for N GPUs, or 0 (default: the GPUs of this machine)", metavar="N"
    )
    gpu_type: str | None = option(None, f"with --plan: one of {', '.join(GPU_TYPES)}", metavar="TYPE")
    decode_cores: int | None = option(
        None, "with --plan: decode on N vCPUs (default: the usual number for these GPUs)", metavar="N"
    )
    price: list[str] = option(
        [],
        "with --plan: the price of a gpu-hour (including its CPUs), of a core-hour (if CPUs are paid separately) or "
        "of a gb-month (10^9 bytes stored for a month), e.g. gpu-hour=1.80; may be repeated",
        metavar="NAME=PRICE",
    )
    corpus_videos: float | None = option(
        None, "with --plan: plan for N videos that are not here; needs --seconds", metavar="N", flag="--videos"
    )
    seconds: float | None = option(None, "with --videos: the length of a video in seconds", metavar="S")
    size: str | None = option(
        None, f"with --videos: the size of a video in pixels (default: {_FULL_HD})", metavar="WxH"
    )

    @property
    def prices(self) -> Prices:
        """The prices that ``--price`` gives.

        Raises:
            UsageError: a name is unknown, or a value is not a positive number.
        """
        prices: dict[str, float] = {}
        for name, text in parse_named_values(self.price, "--price").items():
            check(name in Prices._fields, "price", "of a gpu-hour, a core-hour or a gb-month", name.replace("_", "-"))
            try:
                prices[name] = float(text)
            except ValueError as error:
                raise UsageError(f"--price {name.replace('_', '-')}={text}: it is not a number") from error
            check(is_positive(prices[name]), "price", "a positive number", text)
        return Prices(**prices)

    def pixels(self) -> tuple[int, int]:
        """Parse ``--size``, WIDTHxHEIGHT, by default 1920 x 1080. Raises UsageError for another form."""
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", self.size or _FULL_HD)
        if match is None:
            raise UsageError(f"--size must be WIDTHxHEIGHT, got {self.size!r}")
        return int(match[1]), int(match[2])

    def __post_init__(self) -> None:
        """Check all options.

        Raises:
            UsageError: an option is invalid, options exclude each other, or an option of plans lacks ``--plan``.
        """
        super().__post_init__()
        for name in _PLAN_FIELDS:
            if not self.plan and getattr(self, name) is not None:
                raise UsageError(f"--{name.removeprefix('corpus_').replace('_', '-')} goes with --plan")
        for name in ("decode_cores", "probe", "seconds"):
            value = getattr(self, name)
            check(value is None or is_positive(value), name, "a positive number", value)
        check(self.gpus is None or self.gpus >= 0, "gpus", "at least 0", self.gpus)
        check(self.gpu_type in (None, *GPU_TYPES), "gpu_type", f"one of {', '.join(GPU_TYPES)}", self.gpu_type)
        if self.gpu_type is not None and self.gpus == 0:
            raise UsageError(f"--gpu-type {self.gpu_type} and --gpus 0 do not go together")
        if self.device == "cpu" and (self.gpu_type is not None or self.gpus):
            raise UsageError("--device cpu goes with neither --gpus nor --gpu-type: its runs encode on CPUs")
        n_videos = self.corpus_videos
        check(
            n_videos is None or (n_videos >= 1 and n_videos % 1 == 0), "videos", "a whole number, at least 1", n_videos
        )
        if (n_videos is None) != (self.seconds is None) or (n_videos is None and self.size is not None):
            raise UsageError(
                "videos that are not here are described by --videos N and --seconds S, and --size if known"
            )
        if n_videos is not None and self.probe is not None:
            raise UsageError("--probe looks at videos that are here; --videos plans without looking at any")
        self.pixels()
        if self.prices != Prices() and not self.plan:
            raise UsageError("--price goes with --plan")
