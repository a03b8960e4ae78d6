"""The GPU kernels against ``gstep.selection.reference``: run by tests/gstep/test_kernels.py in a process of its own.

With TRITON_INTERPRET=1, which must be set before anything imports Triton, on CPU tensors; else on CUDA ones. One file
for check, gram, kernels and lazy: nearly every test runs both forms, and both run the same kernels.
"""

import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gstep.selection import reference
from gstep.selection.gpu import check, gram, launch
from gstep.selection.gpu.check import check_forms
from gstep.selection.gpu.gram import Task, Tuning, choose_tuning, prepare_task, select_by_gram
from gstep.selection.gpu.launch import select_on_gpu
from gstep.selection.gpu.lazy import LazyForm
from gstep.selection.reference import STARTS, density_guided_fps
from tests.gstep.synthetic import defaults

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMS = ["gram", "lazy"]
cuda_only = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")


def tuning(dtype: torch.dtype, candidates: int = 16, rounds: int = 1) -> Tuning:
    if INTERPRETED:
        return Tuning(block=32, block_hidden=16, candidates=candidates, rounds=rounds)
    return replace(choose_tuning(dtype, 0), candidates=candidates, rounds=rounds)


def select(
    form: str,
    tokens: torch.Tensor,
    rho: torch.Tensor,
    budget: int,
    candidates: int = 16,
    rounds: int = 1,
    **options: Any,
) -> list[int]:
    sizes = tuning(tokens.dtype, candidates, rounds)
    options = {"alpha": 0.5, "beta": 1e-6, "start": "density", **options}
    task = prepare_task(tokens.to(DEVICE), rho.to(DEVICE), budget, tuning=sizes, **options)
    assert task is not None
    order = select_by_gram(task) if form == "gram" else LazyForm(task).select()
    assert order.dtype == torch.int64
    return order.tolist()


def assert_as_plain(
    form: str, tokens: torch.Tensor, rho: torch.Tensor, budget: int, candidates: int = 16, **options: Any
) -> None:
    """Compare a form's selection with that of ``density_guided_fps``."""
    expected = density_guided_fps(tokens, rho, budget, **options).tolist()
    assert select(form, tokens, rho, budget, candidates=candidates, **options) == expected


def grid(n_tokens: int, dim: int, largest: int, seed: int) -> torch.Tensor:
    """Draw integer tokens: products that float32 holds, equal distances, copies, zero tokens where ``dim`` is small."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(-largest, largest + 1, (n_tokens, dim)))


def levels(n_tokens: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).choice([0.0, 0.25, 1 / 3, 0.5, 1.0], n_tokens))


def structured(n_frames: int, per_frame: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Make the tokens of two scenes that drift, and noise."""
    rng = np.random.default_rng(seed)
    scene = np.repeat(rng.normal(0.3, 1, (2, per_frame, dim)), -(-n_frames // 2), axis=0)[:n_frames]
    drift = rng.normal(0, 0.05, (n_frames, 1, dim)).cumsum(axis=0)
    return torch.from_numpy(scene + drift + 0.2 * rng.normal(size=scene.shape)).flatten(0, 1)


@pytest.mark.parametrize(("alpha", "dtype"), [*zip((0.3, 0.5, 1.0), DTYPES, strict=True)], ids=str)
def test_order_is_the_oracles_where_products_are_exact(alpha: float, dtype: torch.dtype) -> None:
    case = round(10 * alpha) + DTYPES.index(dtype)
    n_tokens, dim, start = (40, 33, 37)[case % 3], (4, 8, 16)[case % 3], STARTS[case % len(STARTS)]
    tokens, rho = grid(n_tokens, dim, 1 + case % 3, case).to(dtype), levels(n_tokens, case)
    for form in FORMS:
        assert_as_plain(form, tokens, rho, n_tokens, alpha=alpha, start=start)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [114, 981])
def test_keys_that_differ_in_their_last_bit_are_no_tie(seed: int, form: str) -> None:
    # Of these a logarithm would make two different keys equal at the 30th and the 18th pick, on some CPUs.
    assert_as_plain(form, grid(40, 8, 3, seed).half(), levels(40, seed), 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "candidates", "rounds"), [("gram", 0, 0), ("lazy", 5, 2)])
def test_continuous_tokens(form: str, candidates: int, rounds: int, dtype: torch.dtype) -> None:
    # Random tokens show what structured ones hide: a distance that missed one pick.
    rng = np.random.default_rng(1)
    random, rho = torch.from_numpy(rng.normal(size=(40, 40))), torch.from_numpy(rng.uniform(0, 2, 40))
    tokens = (random if dtype == torch.float16 or form == "gram" else structured(4, 10, 40)).to(dtype)
    expected = density_guided_fps(tokens.double(), rho, 20).tolist()
    assert select(form, tokens, rho, 20, candidates=candidates, rounds=rounds) == expected


def test_both_forms_and_the_plain_one_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_GRAM_TOKENS", 64)
    budgets = {20: 20, 65: 9, 33: 1, 50: 17, 64: 12}
    for (size, budget), dtype in zip(budgets.items(), [*DTYPES, torch.float64, torch.float16], strict=True):
        tokens, rho = grid(size, 6, 2, size).to(dtype), levels(size, size)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            order = select_on_gpu(tokens.to(DEVICE), rho.to(DEVICE), budget)
        assert order.tolist() == density_guided_fps(tokens, rho, budget).tolist()
    assert not launch._broken


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_the_lazy_form_serves_where_the_distances_do_not_fit(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(task: Task) -> None:
        raise error

    monkeypatch.setattr(gram, "select_by_gram", run_out)
    tokens, rho = grid(50, 6, 2, 0).bfloat16(), levels(50, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        order = select_on_gpu(tokens.to(DEVICE), rho.to(DEVICE), 17)
    assert order.tolist() == density_guided_fps(tokens, rho, 17).tolist() and not launch._broken


@pytest.mark.parametrize("form", FORMS)
def test_zero_tokens_and_no_density(form: str) -> None:
    zeros, tokens = torch.zeros(17, dtype=torch.float64), grid(17, 3, 1, 0).float()
    tokens[[4, 10]] = 0
    assert select(form, torch.zeros(17, 8), zeros, 17) == list(range(17))
    assert_as_plain(form, tokens, levels(17, 0), 17, alpha=1.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n_tokens", "budget"), [(1, 1), (16, 1), (32, 7)])
def test_any_budget(form: str, n_tokens: int, budget: int) -> None:
    tokens, rho = structured(1, n_tokens, 20), torch.from_numpy(np.random.default_rng(0).uniform(size=n_tokens))
    assert_as_plain(form, tokens.half(), rho, budget)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.float32, -74, 0), (torch.bfloat16, 0, 74)], ids=str)
def test_the_range_of_norms_changes_nothing(dtype: torch.dtype, low: int, high: int, form: str) -> None:
    tokens, rho = grid(40, 6, 2, 0).double(), levels(40, 0)
    exponent = np.random.default_rng(0).integers(low, high + 1, (40, 1))
    spread = torch.from_numpy(np.ldexp(tokens.numpy(), exponent)).to(dtype)
    assert select(form, spread, rho, 40) == density_guided_fps(tokens, rho, 40).tolist()


HIDDEN = 512  # of a static video whose norms would be noise if they were not taken by the kernels' own products


def static_video() -> torch.Tensor:
    """Make three frames of ten tokens, all the same, bfloat16."""
    return torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().repeat(3, 1)


def truncate(patch: pytest.MonkeyPatch, k: int) -> None:
    """Replace products by those that tensor cores make, k channels at a time."""
    from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415 - not on a GPU

    from tests.gstep.selection.gpu.tensor_cores import create_dot  # noqa: PLC0415

    patch.setattr(InterpreterBuilder, "create_dot", create_dot(k))


interpreted = pytest.mark.skipif(not INTERPRETED, reason="for the interpreter alone")


@interpreted
@pytest.mark.parametrize("k", [8, 16])
def test_a_static_video_on_tensor_cores_is_selected_as_by_the_plain_form_and_checked(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(monkeypatch, k)
    tokens, rho = static_video(), torch.zeros(30, dtype=torch.float64)
    expected = density_guided_fps(tokens, rho, 20).tolist()
    assert [select(form, tokens, rho, 20) for form in FORMS] == [expected] * 2
    if k == 8:
        check_forms(torch.device("cpu"), torch.bfloat16, HIDDEN, 32, 8, tuning(torch.float32))


@interpreted
def test_with_norms_taken_elsewhere_a_static_video_is_selected_by_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test before this one would show; and that the check of a process shows it."""
    truncate(monkeypatch, 8)
    exact = lambda tokens, tuning: reference.compute_inverse_norms(tokens)  # noqa: E731
    monkeypatch.setattr(gram, "_compute_inverse_norms", exact)
    tokens, rho = static_video(), torch.zeros(30, dtype=torch.float64)
    assert select("gram", tokens, rho, 20) != density_guided_fps(tokens, rho, 20).tolist()
    with pytest.raises(RuntimeError, match="selects other"):
        check_forms(torch.device("cpu"), torch.bfloat16, HIDDEN, 32, 8, tuning(torch.float32))


def test_keys_beyond_float64_are_not_for_the_kernels() -> None:
    tokens, rho = grid(9, 4, 2, 0).half().to(DEVICE), torch.zeros(9, dtype=torch.float64, device=DEVICE)
    assert prepare_task(tokens, rho, 9, alpha=0.05, beta=1e-30, start="density") is None
    assert prepare_task(tokens, rho + 1e30, 9, alpha=0.05, beta=1e-6, start="density") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_before_the_first_selection_passes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller's default device is: of "meta" nothing can be read."""
    if INTERPRETED:  # whose own products of copies differ
        truncate(monkeypatch, 16)
    with defaults(torch.float64, "meta" if dtype == torch.float16 else None):
        check_forms(torch.device(DEVICE), dtype, 24, 40, 20, tuning(dtype))


@pytest.mark.parametrize("form", ["select_by_gram", "LazyForm"])
def test_the_check_sees_a_form_that_is_wrong(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __init__(self, task: Task) -> None:
            self.order = LazyForm(replace(task, inverse=task.inverse.roll(1))).select()

        def select(self) -> torch.Tensor:
            return self.order

    monkeypatch.setattr(check, form, Wrong if form == "LazyForm" else lambda task: Wrong(task).order)
    with pytest.raises(RuntimeError, match="selects other"):
        check_forms(torch.device(DEVICE), torch.float16, 24, 60, 20, tuning(torch.float16))


def test_a_pick_that_is_not_the_best_left_is_seen() -> None:
    tokens, rho = structured(7, 17, 40).half().to(DEVICE), torch.linspace(1, 2, 119, device=DEVICE).double()
    task = prepare_task(tokens, rho, 30, alpha=0.5, beta=1e-6, start="density", tuning=tuning(torch.float16))
    assert task is not None
    order = select_by_gram(task)
    assert not check.find_worse_picks(order, task).any()
    swapped = order[[0, 1, 3, 2, *range(4, 30)]]
    assert check.find_worse_picks(swapped, task).nonzero()[:, 0].tolist() == [2]


@cuda_only
@pytest.mark.parametrize("kind", ["structured", "random"])
@pytest.mark.parametrize(("n_frames", "budget"), [(32, 1568), (128, 6272)])
def test_sets_at_real_sizes(n_frames: int, budget: int, kind: str) -> None:
    dim, per_frame = 3584, 196
    n_tokens = n_frames * per_frame
    random = torch.randn(n_tokens, dim, generator=torch.Generator().manual_seed(0))
    tokens = (structured(n_frames, per_frame, dim) if kind == "structured" else random).bfloat16().to(DEVICE)
    rho = torch.rand(n_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    expected = set(density_guided_fps(tokens.double(), rho, budget).tolist())
    assert not launch._broken
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ours = select_on_gpu(tokens, rho, budget).tolist()
    assert len(set(ours)) == budget
    assert len(expected & set(ours)) >= 0.999 * budget


@cuda_only
@pytest.mark.parametrize("n_frames", [32, 128])
def test_copies_at_real_sizes(n_frames: int) -> None:
    frame = torch.randn(196, 3584, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    rho = torch.zeros(196 * n_frames, dtype=torch.float64, device=DEVICE)
    order = select_on_gpu(frame.repeat(n_frames, 1), rho, 3 * 196, alpha=1.0).tolist()
    assert sorted(order[:196]) == list(range(196))
    assert order[196:] == list(range(196, 3 * 196))
