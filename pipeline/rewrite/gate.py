"""A gate on generated answers, which compares those from coded tokens with those from bfloat16 tokens.

A sample of questions is answered from both, several tokens each. Compared are the answers' tokens, and the
distributions of the next token along the answer from bfloat16 tokens. The noise floor is what the same bfloat16 tokens
give in batches of another size. A codec passes where the upper ends of both 95 % intervals of what goes beyond that
floor are within the bounds: too few answers, or too weak a codec, and it is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from string import ascii_uppercase

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, LanguageModel, Prompt, PromptBuilder, Visual, load_language_model, prompt_builder
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.codecs import TokenCodec, codec_of
from pipeline.cache.codecs.sample import drop_sample, sample_store
from pipeline.cache.header import Excess, GateRecord, header_bytes
from pipeline.cache.reader import HEADER, TokenCache, UngatedCache
from pipeline.errors import RunFailed, UsageError
from pipeline.execution.request import refusing
from pipeline.generate.model import model_source
from pipeline.generate.questions import Way, read_questions
from pipeline.rewrite.rewrite import Rewrite
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store

MOST_CHANGED, MOST_KL = 0.10, 0.02  # upper ends of the intervals: a share of answers, and nats a token
MOST_QUESTIONS, LEAST_ANSWERS = 200, 30  # 3 / 30 is the bound: what is not seen in n answers is at most 3 / n
NEW_TOKENS = 32
BATCH, OTHER_BATCH = 8, 3
_DRAWS, _CLUSTERS = 10_000, 10  # fewer videos than that, and answers are resampled one by one
#: What is asked about every video where nobody gives questions.
PROMPTS = (
    "Describe the video.",
    "What happens in this video, from its beginning to its end?",
    "Which objects and people are visible?",
    "What colors and shapes are there, and where are they?",
    "What changes between the beginning and the end?",
    "What moves, and in which direction?",
    "Which text can be read in the video?",
    "Where was this video made, and how many things are in it?",
)
Say = Callable[[str], object]
Pair = Callable[[str], tuple[CachedVideo, CachedVideo]]  # a video as bfloat16, and as it is coded


@dataclass(frozen=True)
class Asked:
    """A question of a gate: its text, and the videos it is about."""

    text: str
    video_ids: tuple[str, ...]


def read_gate(questions: str, objects: Objects) -> pa.Table:
    """Read the questions of a gate from a file. Raises QuestionsError."""
    return read_questions(questions, Way(Decoding(NEW_TOKENS), "generate"), objects)


def asked_of(questions: str, video_ids: Sequence[str], objects: Objects) -> list[Asked]:
    """Draw the questions of a gate: of a file those about ``video_ids``; "" asks PROMPTS about them.

    Raises UsageError where there are none.
    """
    random = np.random.default_rng(0)
    if questions:
        known = frozenset(video_ids)
        asked = [
            Asked(_text(row["prompt"], row["choices"]), tuple(row["video_ids"]))
            for row in read_gate(questions, objects).to_pylist()
            if known.issuperset(row["video_ids"])
        ]
        asked = [asked[i] for i in random.permutation(len(asked))[:MOST_QUESTIONS]]
    else:
        drawn = [video_ids[i] for i in random.permutation(len(video_ids))[:MOST_QUESTIONS]]
        rounds = (zip(drawn, (PROMPTS * len(drawn))[start:], strict=False) for start in range(len(PROMPTS)))
        asked = [Asked(text, (video_id,)) for one in rounds for video_id, text in one][:MOST_QUESTIONS]
    if not asked:
        raise UsageError(f"--gate {questions}: no question is about a video that is there both as bfloat16 and coded")
    return sorted(asked, key=lambda one: one.video_ids)


def _text(prompt: str, choices: Sequence[str] | None) -> str:
    """Return a question as it is put to the model: a letter alone would say little, so a reason is asked for too."""
    options = "".join(f"{letter}. {text}\n" for letter, text in zip(ascii_uppercase, choices or (), strict=False))
    return f"{prompt}\n{options}Say which is right, and why." if choices else prompt


def restored(video: CachedVideo, codec: TokenCodec) -> CachedVideo:
    """Return a video of bfloat16 tokens as a reader gets it once it is coded."""

    def coded(values: Tensor) -> Tensor:
        return codec.restored(values.contiguous().view(torch.int16).numpy())

    return replace(video, tokens=coded(video.tokens), deepstack=tuple(map(coded, video.deepstack)))


def run_gate(
    asked: Sequence[Asked],
    pair: Pair,
    source: ModelSource,
    codec: TokenCodec,
    questions: str,
    say: Say,
) -> GateRecord:
    """Answer the questions from both, and judge. Raises UsageError where a prompt cannot be built, ModelError."""
    runtime = choose_runtime("auto", "auto", "auto")
    gate = _Gate(load_language_model(source, runtime), prompt_builder(source), pair)
    compared: list[_Compared] = []
    for start in range(0, len(asked), BATCH):
        compared += gate.compare(asked[start : start + BATCH])
        if start // BATCH % 8 == 0:
            say(f"gate: {len(compared)} of {len(asked)} questions")
    about = [one.video_ids for one in asked]
    table = np.array(compared, np.float64)
    changed = excess(table[:, 0], table[:, 1], about, MOST_CHANGED)
    changed["high"] = max(changed["high"], 3 / len(asked))
    kl = excess(table[:, 2], table[:, 3], about, MOST_KL)
    return {
        "passed": changed["high"] <= MOST_CHANGED and kl["high"] <= MOST_KL,
        "codec": codec.name,
        "changed": changed,
        "kl": kl,
        "answers": len(asked),
        "videos": len({name for names in about for name in names}),
        "answer_tokens": float(table[:, 4].mean()),
        "questions": questions or "fixed prompts",
        "runtime": {name: str(value) for name, value in runtime.describe().items()},
    }


def lines_of(record: GateRecord) -> Iterator[str]:
    """Say what a gate found, for the user."""
    for name, what, unit in (("changed", "answers changed", "%"), ("kl", "KL of the next token", "")):
        found: Excess = record[name]  # type: ignore[literal-required]
        shown = {key: f"{value:.1%}" if unit else f"{value:.4f}" for key, value in found.items()}
        yield (
            f"gate: {what}: {shown['mean']} beyond the noise floor of {shown['floor']}, 95 %: {shown['low']} to "
            f"{shown['high']}, bound {shown['bound']}"
        )
    answers = f"{record['answers']} answers of {record['answer_tokens']:.1f} tokens about {record['videos']} videos"
    verdict = "passes" if record["passed"] else "is refused"
    few = "" if record["answers"] >= LEAST_ANSWERS else f": too few to tell, {LEAST_ANSWERS} are the least"
    yield f"gate: {record['codec']} {verdict} ({answers}{few})"


_Compared = tuple[float, float, float, float, float]  # changed, and in noise; KL, and in noise; tokens of the answer


class _Gate:
    """Answers questions from both forms of the videos."""

    def __init__(self, model: LanguageModel, builder: PromptBuilder, pair: Pair) -> None:
        self._model, self._builder = model, builder
        self._placeholder = int(model.model.config.video_token_id)

        @lru_cache(maxsize=2 * BATCH)
        def visuals(video_id: str) -> tuple[Visual, Visual]:
            whole, coded = pair(video_id)
            return whole.visual, coded.visual

        self._visuals = visuals

    def compare(self, asked: Sequence[Asked]) -> Iterator[_Compared]:
        """Yield what differs, for each question of a batch."""
        whole, coded = (self._prompts(asked, form) for form in (0, 1))
        given = self._answers(whole, BATCH)
        # A model of random weights may write the placeholder of a video, which no prompt may hold without one.
        answers = [tuple(takewhile(lambda token: token != self._placeholder, answer)) for answer in given]
        again, others = self._answers(whole, OTHER_BATCH), self._answers(coded, BATCH)
        expected = self._logprobs(whole, answers, BATCH)
        noise, found = self._logprobs(whole, answers, OTHER_BATCH), self._logprobs(coded, answers, BATCH)
        for i, answer in enumerate(given):
            changed, floor = float(others[i] != answer), float(again[i] != answer)
            yield changed, floor, _kl(expected[i], found[i]), _kl(expected[i], noise[i]), float(len(answer))

    def _prompts(self, asked: Sequence[Asked], form: int) -> list[Prompt]:
        try:
            return [
                self._builder.build(one.text, [self._visuals(name)[form] for name in one.video_ids]) for one in asked
            ]
        except ValueError as error:
            raise UsageError(f"--gate: a prompt cannot be built: {error}") from error

    def _answers(self, prompts: Sequence[Prompt], size: int) -> list[tuple[int, ...]]:
        """Return the tokens of greedy answers, in batches of ``size``."""
        parts = (prompts[start : start + size] for start in range(0, len(prompts), size))
        return [
            answer.token_ids
            for part in parts
            for answer in self._model.generate(part, [Decoding(NEW_TOKENS)] * len(part))
        ]

    def _logprobs(self, prompts: Sequence[Prompt], answers: Sequence[tuple[int, ...]], size: int) -> list[Tensor]:
        """Return the log-probabilities [n+1,V] of each token of an answer of n tokens, and of what follows it."""
        found: list[Tensor] = []
        for start in range(0, len(prompts), size):
            part = answers[start : start + size]
            longer = [_continued(p, ids) for p, ids in zip(prompts[start : start + size], part, strict=True)]
            logits = self._model.logits(longer, last=1 + max(map(len, part)))
            found += [
                torch.log_softmax(row[-1 - len(ids) :].float(), -1) for row, ids in zip(logits, part, strict=True)
            ]
        return found


def _continued(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt with the tokens of its answer behind it; text follows text by one position each."""
    places = prompt.positions[:, -1:] + torch.arange(1, len(ids) + 1)
    new = torch.tensor(ids, dtype=prompt.input_ids.dtype)
    return replace(
        prompt, input_ids=torch.cat([prompt.input_ids, new]), positions=torch.cat([prompt.positions, places], 1)
    )


def _kl(expected: Tensor, found: Tensor) -> float:
    """Return the mean over positions of the divergence of [n,V] log-probabilities, in nats."""
    return max(0.0, float((expected.exp() * (expected - found)).sum(-1).mean()))


def excess(
    values: NDArray[np.float64], floor: NDArray[np.float64], about: Iterable[tuple[str, ...]], bound: float
) -> Excess:
    """Return the mean of ``values`` less ``floor``, and its 95 % interval from draws of whole videos.

    ``about`` are the videos of each answer.
    """
    difference = values - floor
    _, cluster = np.unique(["\0".join(names) for names in about], return_inverse=True)
    if cluster.max() + 1 < _CLUSTERS:
        cluster = np.arange(len(difference))
    sums, counts = np.bincount(cluster, difference), np.bincount(cluster)
    drawn = np.random.default_rng(0).integers(len(counts), size=(_DRAWS, len(counts)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return {"mean": float(difference.mean()), "low": low, "high": high, "floor": float(floor.mean()), "bound": bound}


def gate_recoding(what: Rewrite, questions: str, model: str | None, objects: Objects, say: Say) -> Rewrite:
    """Return a recoding whose header carries its gate, which compares tokens as they would be written.

    Raises RunFailed where the gate refuses, and as ``run_gate``.
    """
    cache, codec = what.source, codec_of(what.header["identity"])

    def pair(video_id: str) -> tuple[CachedVideo, CachedVideo]:
        video = cache.get(video_id)
        return video, restored(video, codec)

    record = _judged(cache, questions, model, pair, cache.video_ids, codec, objects, say)
    if not record["passed"]:
        raise RunFailed(f"the gate refuses {codec.name} for {cache.store}: nothing was written")
    return replace(what, header={**what.header, "gate": record})


def gate_cache(store: Store, questions: str, model: str | None, objects: Objects, say: Say) -> GateRecord:
    """Compare the sample of a cache of coded tokens with what is stored of it, and note the result in the header.

    The sample is deleted where the gate passes. Raises UsageError where there is none, and as ``run_gate``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UngatedCache)
        cache = TokenCache(str(store), store=store)
    place = sample_store(store)
    if not place.exists(HEADER):
        raise UsageError(f"--gate: {store} has no sample of bfloat16 rows to compare with (--gate-sample)")
    sample = TokenCache(str(place), store=place)
    ids = sorted({*sample.video_ids}.intersection(cache.video_ids))
    record = _judged(
        cache, questions, model, lambda name: (sample.get(name), cache.get(name)), ids, cache.codec, objects, say
    )
    store.put(HEADER, header_bytes({**cache.header, "gate": record}))
    if record["passed"]:
        drop_sample(store)
    return record


def _judged(
    cache: TokenCache,
    questions: str,
    model: str | None,
    pair: Pair,
    ids: Sequence[str],
    codec: TokenCodec,
    objects: Objects,
    say: Say,
) -> GateRecord:
    with refusing():
        record = run_gate(asked_of(questions, ids, objects), pair, model_source(cache, model), codec, questions, say)
    for line in lines_of(record):
        say(line)
    return record
