"""The base class of the methods that use the spatio-temporal density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gstep.density import BOUNDARIES, FUSIONS, SMOOTHINGS, spatio_temporal_density
from gstep.pruners.base import Pruner
from gstep.pruners.checks import check_choice, check_integer, check_number

_MAX_RADIUS = 10_000  # frames; the smoothing holds [T, 2r+1] numbers


@dataclass(frozen=True, kw_only=True)
class DensityPruner(Pruner):
    """The base class of the methods that use the spatio-temporal density rho.

    Attributes:
        smoothing: The temporal kernel: "gaussian" (Eq. 5), "box" (a fixed window) or "raw" (none).
        sigma: The standard deviation of the Gaussian in frames, > 0 and at most 3333.
        radius: In frames, at most 10,000; None means ceil(3 sigma) for gaussian and 1 for box.
        boundary: The rule for frames beyond the video's ends: "replicate", "zero", "reflect", "symmetric", "renorm" or
            "circular".
        fusion: The factors of rho (Eq. 8): "full", "temporal" or "spatial".
        eps: Keeps the mean normalization (Eq. 7) from dividing by 0, > 0.
    """

    nested: ClassVar[bool] = True

    smoothing: str = "gaussian"
    sigma: float = 1.0
    radius: int | None = None
    boundary: str = "replicate"
    fusion: str = "full"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid parameter, and convert numbers to floats or ints."""
        check_choice("smoothing", self.smoothing, SMOOTHINGS)
        check_choice("boundary", self.boundary, BOUNDARIES)
        check_choice("fusion", self.fusion, FUSIONS)
        widest = _MAX_RADIUS / 3
        sigma = check_number("sigma", self.sigma, f"in (0, {widest:.0f}]", lambda sigma: 0 < sigma <= widest)
        radius = self.radius if self.radius is None else check_integer("radius", self.radius, 0, _MAX_RADIUS)
        eps = check_number("eps", self.eps, "above 0", lambda eps: eps > 0)
        self._set(sigma=sigma, radius=radius, eps=eps)

    def density(self, tokens_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rho of every token, [M], and the temporal density, [T], Eqs. (2)-(8), both float64."""
        rho_TN, temporal_T = spatio_temporal_density(
            tokens_TND,
            smoothing=self.smoothing,
            sigma=self.sigma,
            radius=self.radius,
            boundary=self.boundary,
            fusion=self.fusion,
            eps=self.eps,
        )
        return rho_TN.reshape(-1), temporal_T
