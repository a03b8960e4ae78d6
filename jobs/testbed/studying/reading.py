"""A model that looks at videos and answers questions about some of their tokens, as jobs.prune and jobs.generate do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.evidence import is_per_frame
from gstep.language import Visual, load_language_model, prompt_builder
from gstep.language.types import POSITIONS
from gstep.pruners.base import Pruner
from jobs.testbed.studying.cases import Case, FilmedCases
from jobs.testbed.studying.knock_out import TokenSet
from pipeline.errors import UsageError, VideoFault
from pipeline.evaluate.benchmarks.shapes import SHAPES
from pipeline.evaluate.protocols import FrameRule
from pipeline.evaluate.whole_cache import frame_rule
from pipeline.generate.choices import lettered_prompt, letters
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling

#: Whose tokens lie in a square grid, frame by frame, and whose prompts go without any token.
FAMILY = "llava_onevision"
_AGAIN = "make its folder again with python -m jobs.testbed make"


def check_family(source: ModelSource) -> None:
    """Raise UsageError for a model whose tokens are not frame by frame."""
    if source.model_type != FAMILY:
        raise UsageError(
            f"--model {source.name} is of type {source.model_type}: a study needs tokens frame by frame, name one of "
            f"type {FAMILY}, such as shapes"
        )


class Reader:
    """Holds both halves of a model.

    Args:
        evidence: what encoding gives besides the tokens, label -> source (gstep.evidence).
    """

    def __init__(self, source: ModelSource, evidence: Mapping[str, str]) -> None:
        check_family(source)
        runtime = choose_runtime()
        self.device = runtime.device
        self._evidence = evidence
        family = family_of(source)
        self._newline = family.static().newline
        rules = SHAPES.protocol().rules(source.model_type)
        self._frames, self._system = rules.frames, rules.system
        self._backbone = family.load(runtime)
        self._builders = {name: prompt_builder(source, name) for name in POSITIONS}
        self._model = load_language_model(source, runtime)

    def look(self, film: FilmedCases) -> Visual:
        """All tokens of a video, in bfloat16 as a cache keeps them, on the CPU.

        Raises UsageError where the file is not the video that the questions are about.
        """
        request = DecodeRequest(film.path, _sampling(self._frames), self._backbone.preprocessor)
        try:
            frames = decode_video(request).frames
        except VideoFault as error:
            raise UsageError(f"{film.path}: {error.message}; {_AGAIN}") from error
        if any(case.evidence.n_frames != len(frames) for case in film.cases):
            raise UsageError(f"{film.path} has {len(frames)} frames, not those of its questions; {_AGAIN}")
        encoded = self._backbone.encode(frames, self._evidence)
        n_frames, per_frame, _ = encoded.tokens.shape
        return Visual(
            tokens=_stored(encoded.tokens.flatten(0, 1)),
            index=torch.arange(n_frames * per_frame),
            n_frames=n_frames,
            tokens_per_frame=per_frame,
            newline=self._newline,
            evidence={
                name: _stored(values if is_per_frame(name) else values.flatten(0, 1))
                for name, values in encoded.evidence.items()
            },
        )

    def right(
        self,
        cases: Sequence[Case],
        visuals: Sequence[Visual],
        positions: str,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[bool]:
        """Whether the likeliest letter is the right one, a question and what is left of its video each.

        Args:
            positions: "contiguous" or "original".
            inside: a method that prunes inside the model, and the share that it keeps.
        """
        builder = self._builders[positions]
        prompts = [
            builder.build(lettered_prompt(case.item.question, case.item.options), [visual], self._system)
            for case, visual in zip(cases, visuals, strict=True)
        ]
        scores = self._model.score(prompts, [letters(len(case.item.options)) for case in cases], inside=inside)
        sums = [[score.logprob for score in of_one] for of_one in scores]
        return [of_one.index(max(of_one)) == case.item.answer for case, of_one in zip(cases, sums, strict=True)]


def grid_of(visual: Visual) -> int:
    """Tokens of a frame's side."""
    return math.isqrt(visual.tokens_per_frame)


def only(visual: Visual, kept: TokenSet) -> Visual:
    """Those of a whole video's tokens that are in the set."""
    index = torch.from_numpy(kept).nonzero()[:, 0]
    return replace(visual, tokens=visual.tokens[index], index=index, evidence={})


def _sampling(rule: FrameRule) -> Sampling:
    return Sampling(num_frames=rule.num_frames, rule=frame_rule(rule))


def _stored(values: Tensor) -> Tensor:
    return values.to("cpu", torch.bfloat16)
