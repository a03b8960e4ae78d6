"""Farthest point sampling against a brute-force float64 numpy reading of Eqs. (9)-(12), and GPU fallbacks."""

import sys
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from gstep.selection.gpu import launch
from gstep.selection.gpu.launch import select_on_gpu
from gstep.selection.lazy import lazy_density_guided_fps
from gstep.selection.reference import STARTS, density_guided_fps, find_isolated_token
from tests.gstep.oracle import all_distances, exact_tokens, oracle, oracle_start
from tests.gstep.synthetic import FLOATS, needs_cuda


def select_by_all_forms(tokens: torch.Tensor, rho: torch.Tensor, budget: int, **options: Any) -> Iterator[list[int]]:
    """Select by the plain form, and by the lazy one in blocks and dimensions of several sizes."""
    yield density_guided_fps(tokens, rho, budget, **options).tolist()
    for block, dims in product((1, 5, 64, None), {0, min(4, len(tokens) // 2)}):
        yield lazy_density_guided_fps(tokens, rho, budget, candidates=block, dims=dims, **options).tolist()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("alpha", "dtype"), [*zip((0.3, 0.3, 0.5, 1.0), FLOATS, strict=True)], ids=str)
def test_order_is_exact_where_arithmetic_is(start: str, alpha: float, dtype: torch.dtype) -> None:
    for seed, n_tokens in enumerate([1, 2, 17, 40]):
        tokens = exact_tokens(n_tokens, seed)
        tokens[n_tokens // 2] = 0
        rho = np.random.default_rng(seed).choice([0.0, 0.25, 0.5, 1.0], n_tokens)
        expected = oracle(tokens, rho, n_tokens, alpha, start=start)[0]
        given_tokens = torch.from_numpy(tokens).to(dtype), torch.from_numpy(rho), n_tokens
        for number, ours in enumerate(select_by_all_forms(*given_tokens, alpha=alpha, start=start)):
            assert ours == expected, (n_tokens, number)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_order_of_continuous_tokens_up_to_near_ties(alpha: float, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    tokens, rho = torch.from_numpy(rng.normal(0.3, 1.0, (120, 40))).to(dtype), rng.uniform(0, 2, 120)
    for beta in (1e-8, 1e-6, 1e-3):
        ours = density_guided_fps(tokens, torch.from_numpy(rho), 90, alpha=alpha, beta=beta).tolist()
        expected, clear = oracle(tokens.double().numpy(), rho, 90, alpha, beta)
        assert clear >= 20
        assert ours[:clear] == expected[:clear]
        assert ours == expected or dtype != torch.float64


def test_alpha_0_is_the_densest_with_ties_by_index() -> None:
    rho = torch.tensor([0.5, 1.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    tokens = torch.eye(5)
    assert density_guided_fps(tokens, rho, 5, alpha=0.0).tolist() == [1, 3, 0, 2, 4]
    # The logarithms of the first two are equal.
    close = torch.tensor([1e9, np.nextafter(1e9, 2e9), 2e9], dtype=torch.float64)
    assert density_guided_fps(tokens[:3], close, 3, alpha=0.0).tolist() == [2, 1, 0]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("start", STARTS)
def test_no_density_at_all_and_zero_tokens(start: str, alpha: float) -> None:
    zeros = torch.zeros(9, dtype=torch.float64)
    assert density_guided_fps(torch.zeros(9, 4), zeros, 9, alpha=alpha, start=start).tolist() == list(range(9))
    tokens = exact_tokens(9, 3)
    tokens[4] = 0
    ours = density_guided_fps(torch.from_numpy(tokens), zeros, 9, alpha=1.0, start=start).tolist()
    assert ours == oracle(tokens, np.zeros(9), 9, 1.0, start=start)[0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_copies_of_a_token_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    for n_copies, n_tokens, dim in ((7, 11, 96), (3, 37, 777)):
        frame = torch.from_numpy(np.random.default_rng(n_tokens).normal(size=(n_tokens, dim))).to(dtype)
        rho = torch.zeros(n_copies * n_tokens)
        for form in (density_guided_fps, lazy_density_guided_fps):
            ours = form(frame.repeat(n_copies, 1), rho, 2 * n_tokens, alpha=1.0).tolist()
            assert sorted(ours[:n_tokens]) == list(range(n_tokens))
            assert ours[n_tokens:] == list(range(n_tokens, 2 * n_tokens))


def test_most_isolated_does_not_depend_on_the_block() -> None:
    for seed in range(20):
        tokens = np.random.default_rng(seed).normal(0.2, 1.0, (65, 24)).astype(np.float32)
        distance = all_distances(tokens.astype(np.float64))
        # The most isolated token and its nearest neighbour are often each other's: an exact tie in exact arithmetic.
        expected = oracle_start("isolated", np.minimum(distance, distance.T), np.zeros(65))
        assert {find_isolated_token(torch.from_numpy(tokens), block).item() for block in (1, 7, 64, 1000)} == {expected}
    assert find_isolated_token(torch.ones(1, 3)).tolist() == find_isolated_token(torch.ones(5, 3)).tolist() == [0]


@needs_cuda
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("start", STARTS)
def test_order_on_cuda(start: str, dtype: torch.dtype) -> None:
    tokens = exact_tokens(300, 1)
    rho = np.random.default_rng(1).choice([0.0, 0.25, 0.5, 1.0], 300)
    on_cuda = torch.from_numpy(tokens).to("cuda", dtype), torch.from_numpy(rho).cuda()
    expected = oracle(tokens, rho, 300, start=start)[0]
    assert density_guided_fps(*on_cuda, 300, start=start).tolist() == expected


@needs_cuda
def test_no_step_waits_for_the_device() -> None:
    tokens, rho = torch.randn(300, 16, device="cuda"), torch.rand(300, device="cuda")

    def waits(budget: int) -> int:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                density_guided_fps(tokens, rho, budget)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return len(caught)

    assert waits(100) == waits(2)


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
