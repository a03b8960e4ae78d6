"""What the tables and figures of the GSTEP paper compare: methods, shares and benchmarks, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal

#: The layouts: blocks of methods by share (Tables 1, 2); groups of rows (Table 4); a grid of two parameters
#: (the figure of sensitivity); scores relative to full retention alone (the figure of Qwen3-VL).
Layout = Literal["blocks", "groups", "heatmaps", "relative"]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """The layout of one table or figure of the paper.

    Attributes:
        title: what it is in the paper.
        methods: METHOD[,NAME=VALUE...] in the order of rows.
        ratios: retention ratios, the largest first.
        benchmarks: names in the order of columns; of those that have several names any one of a place will do.
        split: the benchmarks whose first split has columns of its own.
        groups: titles of groups, and in each the title of a row and its method.
        axes: the two parameters of a grid with their values, the one of rows first; ``default`` is the paper's choice.
    """

    title: str
    layout: Layout
    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    benchmarks: tuple[tuple[str, ...], ...]
    split: frozenset[str] = frozenset()
    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    default: tuple[str, ...] = ()


_VIDEOMME, _LVB = ("videomme",), ("longvideobench",)
_MLVU, _MVBENCH, _EGO = ("mlvu-dev", "mlvu-test"), ("mvbench",), ("egoschema-subset", "egoschema")
_ABLATION = (
    (
        "Temporal construction",
        (
            ("Raw change", "gstep,smoothing=raw"),
            ("Fixed smoothing", "gstep,smoothing=box"),
            ("Gaussian smoothing", "gstep"),
        ),
    ),
    (
        "Density fusion",
        (("Temporal only", "gstep,fusion=temporal"), ("Spatial only", "gstep,fusion=spatial"), ("Full GSTEP", "gstep")),
    ),
    (
        "Sampling strategy",
        (
            ("Random", "random"),
            ("Uniform", "uniform"),
            ("Top-k only", "topk"),
            ("FPS only", "fps"),
            ("Density-guided FPS", "gstep"),
        ),
    ),
)
# The figure's own grid is not in the text of the paper; it names 1.0 to 1.5 and 0.5 to 0.6 as its best region.
_SIGMAS, _ALPHAS = ("0.5", "1.0", "1.5", "2.0"), ("0.3", "0.4", "0.5", "0.6", "0.7")

TABLES: Mapping[str, PaperTable] = MappingProxyType(
    {
        "main": PaperTable(
            title="Tables 1 and 2: main results",
            layout="blocks",
            methods=("fastv", "fastvid", "cdpruner", "visionzip", "vidcom2", "gstep"),
            ratios=(0.25, 0.20, 0.15, 0.10),
            benchmarks=(_VIDEOMME, _LVB, _MLVU, _MVBENCH, _EGO),
            split=frozenset(_VIDEOMME),
        ),
        "ablation": PaperTable(
            title="Table 4: ablations at 85 % pruning",
            layout="groups",
            methods=tuple(dict.fromkeys(method for _, rows in _ABLATION for _, method in rows)),
            ratios=(0.15,),
            benchmarks=(_VIDEOMME, _LVB, _MLVU),
            groups=_ABLATION,
        ),
        "sensitivity": PaperTable(
            title="Sensitivity to sigma and alpha at 85 % pruning",
            layout="heatmaps",
            methods=tuple(f"gstep,alpha={alpha},sigma={sigma}" for sigma, alpha in product(_SIGMAS, _ALPHAS)),
            ratios=(0.15,),
            benchmarks=(_MLVU, _LVB),
            axes=(("sigma", _SIGMAS), ("alpha", _ALPHAS)),
            default=("1.0", "0.5"),
        ),
        "qwen3": PaperTable(
            title="Qwen3-VL at 75 % pruning, relative to full retention",
            layout="relative",
            methods=("visionzip", "vidcom2", "gstep"),
            ratios=(0.25,),
            benchmarks=(_VIDEOMME, _LVB, _MVBENCH, _EGO),
        ),
    }
)
