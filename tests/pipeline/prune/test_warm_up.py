"""Kernels are compiled beside the loading of a model, and what goes wrong there costs no video."""

import threading
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from gstep.backbones import ModelSource
from gstep.pruners.base import Pruner, Selection
from gstep.types import VisualTokens
from pipeline.prune import encode_stage
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.prune.warm_up import compile_meanwhile
from tests.gstep.synthetic import needs_cuda

pruned: list[tuple[str, list[int], int]] = []


@dataclass(frozen=True, kw_only=True)
class Recorder(Pruner):
    """Keeps the first tokens, and notes in which thread, of what shape and how many."""

    name: ClassVar[str] = "recorder"
    nested: ClassVar[bool] = False

    breaks: bool = False

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        pruned.append((threading.current_thread().name, list(visual.tokens.shape), budget))
        if self.breaks:
            raise RuntimeError("no compiler")
        return Selection(index=torch.arange(budget))


@pytest.fixture(autouse=True)
def _nothing_pruned():
    pruned.clear()


def test_a_method_compiles_in_a_thread_while_the_context_works():
    """The method waits for the context's body here, so that this ends only where both run at once."""
    begun = threading.Event()

    @dataclass(frozen=True, kw_only=True)
    class Waiting(Recorder):
        def select(self, *given) -> Selection:
            assert begun.wait(60)
            return super().select(*given)

    with compile_meanwhile(Waiting(), 0.25, (4, 9, 16), "cpu"):
        assert pruned == []
        begun.set()
    assert pruned == [("compile", [4, 9, 16], 9)]


def test_a_failure_is_warned_of_and_raises_nothing():
    warned = pytest.warns(RuntimeWarning, match="recorder could not be tried .*no compiler")
    with warned, compile_meanwhile(Recorder(breaks=True), 0.25, (2, 3, 4), "cpu"):
        pass
    assert len(pruned) == 1


def test_only_a_gpu_that_knows_its_videos_compiles_ahead(monkeypatch):
    """The shape is that of the kept tokens' source, by the model's config; a user's own method may do anything."""
    taken = []
    monkeypatch.setattr(encode_stage, "compile_meanwhile", lambda *given: taken.append(given))
    setup = EncodeSetup(ModelSource.resolve("tiny"), "gstep", 0.25, device="cpu", shape=(2, 384, 384))
    encoder = VideoEncoder(setup)
    assert taken == []
    encoder._runtime = replace(encoder._runtime, device="cuda")
    encoder._compile_kernels_meanwhile()
    tokens = encoder.backbone.encode(torch.zeros((2, 384, 384, 3), dtype=torch.uint8)).tokens
    assert [(given[1], given[2], given[3]) for given in taken] == [(0.25, tuple(tokens.shape), "cuda")]
    for other in (replace(setup, shape=None), replace(setup, pruner=f"{__name__}:Recorder")):
        encoder._setup = other
        encoder._compile_kernels_meanwhile()
    assert len(taken) == 1


@needs_cuda
def test_the_kernels_are_checked_before_the_first_video():
    from gstep.selection.gpu.check import check_kernels  # noqa: PLC0415 - Triton may be missing

    check_kernels.cache_clear()
    VideoEncoder(EncodeSetup(ModelSource.resolve("tiny"), "gstep", 0.25, shape=(32, 384, 384)))
    assert check_kernels.cache_info().currsize == 1
