"""Sampling on a GPU: what it falls back on."""

import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gstep.selection.gpu import launch
from gstep.selection.gpu.launch import select_on_gpu
from gstep.selection.reference import density_guided_fps


def videos(count: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    rng = np.random.default_rng(0)
    return [
        (torch.from_numpy(rng.normal(size=(20 + i, 8))).half(), torch.from_numpy(rng.uniform(size=20 + i)), 5 + i)
        for i in range(count)
    ]


@pytest.fixture
def fresh_process() -> Iterator[None]:
    known = (launch._reported, launch._broken)
    before = [*map(list, known)]
    for failures in known:
        failures.clear()
    yield
    for failures, held in zip(known, before, strict=True):
        failures[:] = held


@pytest.mark.usefixtures("fresh_process")
def test_without_triton_the_plain_form_serves_and_one_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "gstep.selection.gpu.gram", "gstep.selection.gpu.lazy", "gstep.selection.gpu.kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delattr("gstep.selection.gpu.gram", raising=False)
    monkeypatch.delattr("gstep.selection.gpu.lazy", raising=False)
    with pytest.warns(RuntimeWarning, match="triton.*PyTorch implementation selects instead") as caught:
        orders = [select_on_gpu(*video, alpha=0.9) for video in videos(3)]
    expected = [density_guided_fps(*video, alpha=0.9) for video in videos(3)]
    assert len(caught) == 1 and all(torch.equal(ours, theirs) for ours, theirs in zip(orders, expected, strict=True))


@pytest.mark.usefixtures("fresh_process")
def test_after_running_out_of_memory_the_next_video_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run_out(*arguments: object) -> None:
        tried.append(arguments)
        raise torch.OutOfMemoryError("a matrix too many")

    monkeypatch.setattr(launch, "_select_with_kernels", run_out)
    (video,) = videos(1)
    with pytest.warns(RuntimeWarning, match="a matrix too many") as caught:
        orders = [select_on_gpu(*video) for _ in range(3)]
    assert (len(tried), len(caught)) == (3, 1)
    assert all(torch.equal(order, density_guided_fps(*video)) for order in orders)


@pytest.mark.usefixtures("fresh_process")
@pytest.mark.parametrize("start", ["density", "isolated"])
def test_alpha_0_needs_no_kernel(start: str) -> None:
    video = videos(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order = select_on_gpu(*video, alpha=0.0, start=start)
    assert torch.equal(order, density_guided_fps(*video, alpha=0.0, start=start))
