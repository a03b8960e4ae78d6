"""The options of an evaluation, as one dataclass that defines the command-line flags and checks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from gstep.methods import METHODS
from pipeline.errors import UsageError
from pipeline.evaluate.statistics import is_named, split_seed
from pipeline.generate.late_pruning import PruningSpec, parse_pruning_grid
from pipeline.options import DTYPES, EngineOptions, RunOptions, check, check_ratio, is_positive, option

DEFAULT_METHODS = ("gstep", "vidcom2", "uniform", "random")
DEFAULT_RATIOS = (0.25, 0.20, 0.15, 0.10)
DEFAULT_WITHIN = 2.0  # points that a safe ratio may lose
FULL = "none"  # full retention
LIST = "lmms:list"  # the --benchmark that lists the tasks of lmms-eval
RESULTS_HEADER = "evaluation.json"
ANSWERS_FOLDER, CACHE_FOLDER = "answers", "cache"  # below --out, as jobs.generate and jobs.prune write them
#: ``--positions`` -> the positions that each method is run with; None is the model family's default.
POSITIONS: Mapping[str, tuple[str | None, ...]] = {
    "auto": (None,),
    "contiguous": ("contiguous",),
    "original": ("original",),
    "both": ("contiguous", "original"),
}
#: Options that mean something else here than in jobs.prune and jobs.generate, that are set from the protocol there, or
#: that are passed on explicitly.
_NOT_SHARED = frozenset(
    {"model", "family", "siglip", "out", "cache", "video_root", "limit", "seed", "retention_ratio", "positions"}
    | {"num_frames", "fps", "max_frames", "max_video_tokens", "max_new_tokens", "max_failed", "on_changed"}
)
#: Option -> the option that it requires.
_GOES_WITH = {
    **dict.fromkeys(("limit", "drop_tokens", "max_new_tokens", "close_thought", "fps"), "benchmark"),
    **dict.fromkeys(("within", "abilities"), "results"),
    **dict.fromkeys(("max_frames", "max_video_tokens"), "fps"),
}


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EngineOptions):
    """All options of ``python -m jobs.evaluate``; exactly one of ``benchmark``, ``score`` and ``results`` is given.

    Empty ``method`` and ``retention_ratio`` mean the defaults with ``benchmark``, and everything that exists with
    ``results``.

    Raises:
        UsageError: an option has an invalid value, or options cannot be combined.
    """

    item: ClassVar[str] = "question"

    benchmark: str | None = option(
        None,
        "videomme, longvideobench, mlvu-dev, mlvu-test, mvbench, egoschema-subset (500 with published "
        "answers), egoschema (all 5,031, for a file to submit), shapes (jobs.testbed), lmms:TASK or "
        "lmms:TASK@METRIC of lmms-eval (lmms:list lists them), or a file of your own questions (.jsonl/.parquet/.csv: "
        "as for jobs.generate, plus answer and optional split, cluster)",
        metavar="NAME",
        group="benchmark",
    )
    data: str | None = option(
        None,
        "the folder with the benchmark's annotations and videos (lmms:TASK: HF_HOME), or the videos of your own "
        "questions (without --data, their video_id names a video of --cache)",
        metavar="DIR",
    )
    video_root: list[str] = option(
        [],
        "a folder, besides --data, that links in --data may point into; may be repeated",
        metavar="DIR",
    )
    protocol: str | None = option(
        None,
        "the prompt, frames and reply parser to follow: lmms-eval-0.7.3 or lmms-eval-0.5 (also called paper); for "
        "videomme also official; letter for shapes and your own questions (default: the benchmark's first)",
        metavar="NAME",
    )
    max_new_tokens: int | None = option(
        None,
        "maximum number of tokens per reply (default: the protocol's); models that reason need thousands",
        metavar="N",
    )
    close_thought: bool = option(
        False,
        "if the model's chat template ends with an opening tag, such as <think>: append its closing tag, so that the "
        "model answers at once",
    )
    limit: int | None = option(None, "ask only the first N questions", metavar="N")
    score: list[str] = option(
        [],
        "score answers of jobs.generate to questions that have a right answer; several folders are compared",
        metavar="ANSWERS",
        several=True,
    )
    results: list[str] = option(
        [],
        "lay out the results of earlier evaluations, one folder per benchmark, as one table; --method and "
        "--retention-ratio choose its rows",
        metavar="RESULTS",
        several=True,
    )
    model: str | None = option(
        None,
        "a Hugging Face id or folder with safetensors, 'shapes', or a seeded random model of jobs.prune (default: "
        "the model that the cache names, or tiny)",
        metavar="MODEL",
        group="model",
    )
    family: str | None = option(
        None,
        "generic: encode and answer with the model's own code in transformers, the default for model types without a "
        "family here; or module:Class of your own family (default: by model type)",
        metavar="FAMILY",
    )
    siglip: str | None = option(
        None,
        "for fastvid and cdpruner on LLaVA-OneVision: the SigLIP checkpoint that its vision tower was made from",
        metavar="MODEL",
    )
    dtype: str = option(
        "auto", "the dtype that the model computes in; auto is bfloat16 on GPUs and float32 on CPUs", choices=DTYPES
    )
    method: list[str] = option(
        [],
        f"pruning methods: {', '.join(METHODS)}, or module:Class of your own; parameters follow commas: fastv,K=3; "
        "random,seed=0..4 runs five seeds, and their mean is one row "
        f"(default: {' '.join(DEFAULT_METHODS)}); full retention is always included",
        metavar="METHOD",
        several=True,
        group="methods",
    )
    retention_ratio: list[float] = option(
        [],
        f"shares of the visual tokens to keep, or percentages (default: {' '.join(map(str, DEFAULT_RATIOS))})",
        metavar="R",
        share=True,
        several=True,
    )
    positions: str = option(
        "auto",
        "positions of the kept tokens: as before pruning (original), renumbered (contiguous), or a row each (both); "
        "auto is the model family's default: contiguous for LLaVA-OneVision and InternVL, original for Qwen. On "
        "LLaVA-OneVision, original gains more than the choice of method does. positions=original after a method "
        "applies to that method only",
        choices=tuple(POSITIONS),
    )
    seed: int = option(
        0, "seed of the intervals, and of methods that draw random numbers and are given no seed", metavar="N"
    )
    reference: str | None = option(
        None,
        "the method that others are compared with; none: full retention (default: gstep, or the first method; full "
        "retention if there is only one method)",
        metavar="METHOD",
    )
    within: float | None = option(
        None,
        "with --results: a retention ratio is safe for a kind of questions if its whole 95 %% interval is above a loss "
        "of X points (default: 2)",
        metavar="X",
    )
    abilities: str | None = option(
        None,
        "with --results: a .csv with the columns benchmark,split,value,ability, which says what kind of ability "
        "questions test; it takes precedence over the built-in table",
        metavar="FILE",
    )
    ours: str | None = option(None, "the method that tables.tex marks as ours", metavar="METHOD")
    out: str = option(
        "results",
        "the results to create or continue: a folder or s3://bucket/prefix",
        metavar="DIR",
        group="results",
    )
    cache: str | None = option(
        None, "the cache of all tokens to create or reuse (default: cache in --out)", metavar="CACHE"
    )
    drop_tokens: bool = option(False, "delete the cache in --out once every question is answered")
    draws: int = option(10_000, "bootstrap samples of videos for intervals", metavar="N")
    num_frames: int | None = option(None, "frames per video (default: the protocol's)", metavar="T", group="videos")
    fps: float | None = option(
        None,
        "sample F frames per second of video instead of the protocol's frames; frame sizes follow the checkpoint's own "
        "settings",
        metavar="F",
    )
    max_frames: int | None = option(
        None, "with --fps: at most this many frames (default: the model family's)", metavar="K"
    )
    max_video_tokens: int | None = option(
        None, "with --fps, Qwen models: cap long videos as jobs.prune --max-video-tokens does", metavar="N"
    )
    decode_timeout: float = option(120.0, "give up on a video after S seconds of decoding", metavar="S")
    decode_workers: int | None = option(None, "start at most N decode workers (default: one per CPU)", metavar="N")
    encode_workers: int | None = option(None, "start at most N encoders (default: one per GPU)", metavar="N")
    workers: int | None = option(
        None, "start at most N language models (default: one per GPU; one on CPUs)", metavar="N", group="answers"
    )
    questions_per_shard: int = option(
        64, "write at most N answers to one file; a killed run loses at most N answers per worker", metavar="N"
    )

    def __post_init__(self) -> None:
        """Check all options.

        Raises:
            UsageError: a value is invalid, options cannot be combined, a method is malformed, or ``reference`` or
                ``ours`` names no row of the table that ``benchmark`` will produce.
        """
        super().__post_init__()
        if [self.benchmark is None, not self.score, not self.results].count(False) != 1:
            raise UsageError(
                "give exactly one of --benchmark NAME (questions to ask), --score ANSWERS (answers to score) and "
                "--results RESULTS (results for one table)"
            )
        for name, other in _GOES_WITH.items():
            value = getattr(self, name)
            if value is not None and value is not False and getattr(self, other) in (None, []):
                raise UsageError(f"--{name.replace('_', '-')} goes with --{other}")
        if self.score and (self.method or self.retention_ratio):
            raise UsageError("--method and --retention-ratio go with --benchmark or --results: answers name their own")
        check(self.out.strip() != "", "out", "a folder or s3://bucket/prefix", self.out)
        for ratio in self.retention_ratio:
            check_ratio("retention_ratio", ratio)
        counts = ("limit", "max_new_tokens", "num_frames", "max_frames", "max_video_tokens")
        for name in (*counts, "questions_per_shard", "decode_workers", "encode_workers", "workers"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1", value)
        check(self.seed >= 0, "seed", "at least 0", self.seed)
        check(self.within is None or is_positive(self.within), "within", "a positive number of points", self.within)
        check(self.draws >= 100, "draws", "at least 100", self.draws)
        check(is_positive(self.decode_timeout), "decode_timeout", "a positive number of seconds", self.decode_timeout)
        if self.drop_tokens and self.cache is not None:
            raise UsageError("--drop-tokens deletes the cache in --out; a cache that --cache names is yours to delete")
        check(self.fps is None or is_positive(self.fps), "fps", "a positive number", self.fps)
        if self.fps is not None and self.num_frames is not None:
            raise UsageError("--num-frames and --fps are two ways of sampling: give one of them")
        self._check_rows({spec.method_label.partition(",positions=")[0] for spec in self.grid().values() if spec})

    def _check_rows(self, labels: Collection[str]) -> None:
        """Raise UsageError if ``reference`` or ``ours`` names no row of the table, unless ``benchmark`` is None."""
        seeds = Counter(split_seed(label)[0] for label in labels)
        rows = {FULL, *(label if seeds[name := split_seed(label)[0]] == 1 else name for label in labels)}
        for option_name in ("reference", "ours") if self.benchmark is not None else ():
            value = getattr(self, option_name)
            if value is not None and not any(is_named(value, row) for row in rows):
                raise UsageError(f"--{option_name} {value} is no row of the table; there are {', '.join(sorted(rows))}")

    def select_shared_options(self, kind: type[RunOptions]) -> dict[str, Any]:
        """Return the options, by name, that another configuration class also has with the same meaning."""
        names = [item.name for item in fields(kind) if item.name not in _NOT_SHARED]
        return {name: value for name, value in vars(self).items() if name in names}

    def join_out(self, name: str) -> str:
        """Return the path or URI of ``name`` below ``out``."""
        return f"{self.out.rstrip('/')}/{name}"

    def grid(self) -> dict[str, PruningSpec | None]:
        """Return the prunings that every question is asked under, by label; the first is full retention, which is None.

        The other methods follow in the given order, by default DEFAULT_METHODS and DEFAULT_RATIOS, each at every ratio
        from the largest. A range of seeds gives one method per seed. A method that names positions gets one arm per
        ratio; otherwise it gets one for each kind of positions that ``positions`` stands for. The method ``none`` adds
        no arm. Methods are parsed but not looked up.

        Raises:
            UsageError: a parameter of a method is not NAME=VALUE, or its positions or range of seeds are invalid.
        """
        specs = parse_pruning_grid(
            self.method or DEFAULT_METHODS, self.retention_ratio or DEFAULT_RATIOS, self.siglip, self.seed
        )
        pruned = [spec for spec in specs if spec.method != FULL]
        placed_specs = [
            replace(spec, positions=positions)
            for spec in pruned
            for positions in ([spec.positions] if spec.positions else POSITIONS[self.positions])
        ]
        return {FULL_LABEL: None, **{spec.label: spec for spec in placed_specs}}


FULL_LABEL = f"{FULL}@1"
