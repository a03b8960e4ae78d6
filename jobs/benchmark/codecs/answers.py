"""Right answers by method, ratio and codec, to the same questions about the videos of a cache of all tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

import gstep
from gstep.backbones import choose_runtime
from gstep.language import Decoding, LanguageModel, Visual, load_language_model, prompt_builder
from gstep.language.prompt import text_ids
from jobs.benchmark.shown import figure_table, say
from pipeline.cache.codecs import CODECS, TokenCodec
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError
from pipeline.execution.request import refusing
from pipeline.generate.choices import lettered_prompt, letters
from pipeline.generate.late_pruning import is_whole
from pipeline.generate.model import model_source
from pipeline.generate.questions import Way, read_questions

#: Codecs by how many bits a number has; of 3 and 2 bits nothing is stored, they only show where answers go.
BY_BITS = (*CODECS.values(), TokenCodec("int3", 3, 32, kept=8), TokenCodec("int2", 2, 32, kept=8))
WIDE, VIDEO_TOKENS = 3584, 32 * 196  # what a video's megabytes are counted by: LLaVA-OneVision-7B
_DRAWS, _CLUSTERS = 10_000, 10  # fewer videos than that, and answers are resampled one by one
Arm = tuple[str, float, str]  # method, ratio, codec


class Excess(TypedDict):
    """A mean difference and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One method, ratio and codec.

    Attributes:
        mb: stored of a video of 32 frames of LLaVA-OneVision-7B.
        right: share of right answers.
        loss: right answers from bfloat16 tokens of the same method and ratio less those from these, with its interval.
        kl: mean divergence of the next token's distribution from that of those, in nats.
    """

    method: str
    ratio: float
    codec: str
    mb: float
    right: float
    loss: Excess
    kl: float


@dataclass(frozen=True)
class _Question:
    video_id: str
    prompt: str
    n_choices: int
    right: int


def measure(cache: TokenCache, questions: str, methods: Sequence[str], ratios: Sequence[float]) -> list[Cell]:
    """Ask every question under every method, ratio and codec.

    Raises UsageError where none can be asked, for a method that is unknown or needs evidence, and for a cache of what a
    method kept.
    """
    with refusing():
        needy = [method for method in methods if gstep.make_pruner(method).needs]
    if needy:
        raise UsageError(f"--method {needy[0]} needs more than tokens; name methods that need no evidence")
    if not is_whole(cache.identity):
        raise UsageError("--whole must be a cache of all tokens: make one with python -m jobs.prune --pruner none")
    source = model_source(cache)
    model, builder = load_language_model(source, choose_runtime("auto", "auto", "auto")), prompt_builder(source)
    rows = _questions(questions, frozenset(cache.video_ids))
    right: dict[Arm, list[float]] = defaultdict(list)
    kl: dict[Arm, list[float]] = defaultdict(list)
    for done, (video_id, group) in enumerate(groupby(rows, key=lambda row: row.video_id)):
        asked, whole = list(group), cache.get(video_id).visual
        for method in methods:
            for ratio in ratios:
                expected: Tensor | None = None
                for codec, visual in _coded(whole, method, ratio):
                    prompts = [builder.build(row.prompt, [visual]) for row in asked]
                    logits = torch.stack([one[-1] for one in model.logits(prompts, last=1)])
                    found = torch.log_softmax(logits.float(), -1)
                    expected = found if expected is None else expected
                    arm = (method, ratio, codec.name)
                    right[arm] += _right(model, found, asked)
                    kl[arm] += (expected.exp() * (expected - found)).sum(-1).tolist()
        if done % 10 == 0:
            say(f"{done} videos")
    about = [(row.video_id,) for row in rows]
    return [_cell(arm, codec, right, kl[arm], about) for arm in right for codec in BY_BITS if codec.name == arm[2]]


def _cell(
    arm: Arm, codec: TokenCodec, right: dict[Arm, list[float]], kl: list[float], about: Sequence[tuple[str, ...]]
) -> Cell:
    method, ratio, _ = arm
    whole, found = (np.array(right[method, ratio, name]) for name in ("bfloat16", codec.name))
    mb = 1e-6 * ratio * VIDEO_TOKENS * codec.token_bytes(WIDE)
    return Cell(method, ratio, codec.name, mb, float(found.mean()), _excess(whole, found, about), float(np.mean(kl)))


def _excess(values: NDArray[np.float64], floor: NDArray[np.float64], about: Iterable[tuple[str, ...]]) -> Excess:
    """Return the mean of ``values`` less ``floor``, and its 95 % interval from draws of whole videos, ``about``."""
    difference = values - floor
    _, cluster = np.unique(["\0".join(names) for names in about], return_inverse=True)
    if cluster.max() + 1 < _CLUSTERS:
        cluster = np.arange(len(difference))
    sums, counts = np.bincount(cluster, difference), np.bincount(cluster)
    drawn = np.random.default_rng(0).integers(len(counts), size=(_DRAWS, len(counts)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return {"mean": float(difference.mean()), "low": low, "high": high}


def _questions(place: str, known: frozenset[str]) -> list[_Question]:
    """Read the questions with choices whose right one is known, about single videos that are there, by video."""
    found = []
    for row in read_questions(place, Way(Decoding(1))).to_pylist():
        choices, target = row["choices"] or [], row["target"]
        names = [*choices, *letters(len(choices))]
        if len(row["video_ids"]) == 1 and row["video_ids"][0] in known and target in names:
            prompt, place_of = lettered_prompt(row["prompt"], choices), names.index(target) % len(choices)
            found.append(_Question(row["video_ids"][0], prompt, len(choices), place_of))
    if not found:
        raise UsageError(f"{place}: no question has choices, a right one, and one video of the cache")
    return sorted(found, key=lambda row: row.video_id)


def _coded(whole: Visual, method: str, ratio: float) -> Iterator[tuple[TokenCodec, Visual]]:
    """Yield the kept tokens of a video by each codec, as prompts take them; bfloat16 first."""
    shape = (whole.n_frames, whole.tokens_per_frame, whole.tokens.shape[1])
    pruned = gstep.prune(whole.tokens.view(shape), ratio, method)
    bits = np.asarray(pruned.tokens.contiguous().view(torch.int16).numpy())
    for codec in BY_BITS:
        # As large a share of the channels as at the width that the megabytes are of: eight are many of a narrow token.
        as_wide = replace(codec, kept=codec.kept * shape[2] // WIDE)
        yield codec, replace(whole, tokens=as_wide.restored(bits), index=pruned.index, evidence={})


def _right(model: LanguageModel, logprobs: Tensor, asked: Sequence[_Question]) -> list[float]:
    """Return 1.0 for each question of which the likeliest letter is the right one."""
    ids = [[text_ids(model.tokenizer, letter)[0] for letter in letters(row.n_choices)] for row in asked]
    return [float(one[of].argmax() == row.right) for one, of, row in zip(logprobs, ids, asked, strict=True)]


def answer_table(cells: Sequence[Cell], title: str) -> Table:
    """Lay the cells out for the terminal."""
    rows = []
    for cell in cells:
        low, high = 100 * cell.loss["low"], 100 * cell.loss["high"]
        loss = f"{100 * cell.loss['mean']:.1f} [{low:.1f}, {high:.1f}]"
        about = (cell.method, f"{100 * cell.ratio:g}%", cell.codec, f"{cell.mb:.2f}", f"{cell.right:.1%}")
        rows.append((*about, loss, f"{cell.kl:.4f}"))
    columns = ("method", "kept", "codec", "MB a video", "right", "less than bfloat16, points", "KL")
    return figure_table(title, columns, rows)
