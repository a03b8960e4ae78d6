"""The lazy selection of large inputs: against the oracle and the plain form, its bound, who takes it, its precision."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.overrides import TorchFunctionMode

import gstep
from gstep.density import spatio_temporal_density
from gstep.selection import dispatch, lazy
from gstep.selection.lazy import lazy_density_guided_fps
from gstep.selection.precision import use_full_precision
from gstep.selection.reference import density_guided_fps
from tests.gstep.oracle import oracle
from tests.gstep.synthetic import defaults, edge_videos
from tests.interpreter import run_python

BLOCKS = [1, 5, 64, None]
KINDS = ["low rank", "scenes", "random"]


def video(kind: str, n_frames: int = 12, per_frame: int = 49, hidden: int = 384, seed: int = 0) -> Tensor:
    """Draw [T,N,D] bfloat16 that change slowly and cut once.

    They are of low rank (a bound tells much), scenes in directions of their own (it tells which picks are likeliest) or
    random (it tells nothing).
    """
    rng = torch.Generator().manual_seed(seed)
    if kind == "random":
        return torch.randn(n_frames, per_frame, hidden, generator=rng).bfloat16()
    rank = 24 if kind == "low rank" else hidden
    content, change = torch.randn(2, 2, per_frame, rank, generator=rng)
    time = torch.linspace(0, 1, n_frames)[:, None, None]
    place = torch.where(time < 0.6, content[0] + time * change[0], content[1] + time * change[1])
    basis = torch.linalg.qr(torch.randn(hidden, rank, generator=rng))[0].T * (hidden / rank) ** 0.5
    return (place @ basis + 0.3 * torch.randn(n_frames, per_frame, hidden, generator=rng)).bfloat16()


def density(tokens_TND: Tensor) -> Tensor:
    return spatio_temporal_density(tokens_TND)[0].flatten()


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_what_the_oracle_in_float64_keeps_and_a_smaller_budget_is_a_prefix(kind: str) -> None:
    tokens = video(kind, seed=1)
    rho, tokens_MD = density(tokens), tokens.flatten(0, 1)
    budget = len(tokens_MD) // 4
    expected, clear = oracle(tokens_MD.double().numpy(), rho.numpy(), budget)
    for dtype in (torch.bfloat16, torch.float64):
        for block, dims in ((None, None), (40, 32), (40, 0), (500, 32)):
            ours = lazy_density_guided_fps(tokens_MD.to(dtype), rho, budget, candidates=block, dims=dims).tolist()
            assert set(ours) == set(expected), (dtype, block, dims)
            assert ours[:clear] == expected[:clear]
    assert density_guided_fps(tokens_MD, rho, budget)[:clear].tolist() == ours[:clear]
    whole = lazy_density_guided_fps(tokens_MD, rho, budget)
    for smaller in (1, 30, budget - 1):
        assert torch.equal(lazy_density_guided_fps(tokens_MD, rho, smaller), whole[:smaller])


def test_edge_videos_as_the_readable_form() -> None:
    for name, tokens in edge_videos().items():
        rho = density(tokens)
        tokens_MD = tokens.flatten(0, 1)
        for budget in {1, len(tokens_MD) // 3, len(tokens_MD)} - {0}:
            expected = density_guided_fps(tokens_MD, rho, budget).tolist()
            for block in BLOCKS:
                ours = lazy_density_guided_fps(tokens_MD, rho, budget, candidates=block).tolist()
                assert set(ours) == set(expected), (name, budget, block)
                assert name == "plain" or len(set(rho.tolist())) > 1 or ours == expected, (name, budget, block)


RANGES = {  # powers of two that rows are multiplied by, from and to: exact, and cosines stay as they are
    "float64 alike": (torch.float64, 140, 140),
    "float32 alike": (torch.float32, -100, -100),
    "bfloat16 alike": (torch.bfloat16, 100, 100),
    "float64 beyond float32": (torch.float64, -300, 300),
    "float64 to its ends": (torch.float64, -1040, 1000),
    "float32 spread": (torch.float32, -37, 37),
    "float32 small": (torch.float32, -74, 0),
    "float32 to its ends": (torch.float32, -130, 120),
    "bfloat16 large": (torch.bfloat16, 0, 74),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_ranges_of_norms_change_nothing(name: str) -> None:
    dtype, low, high = RANGES[name]
    tokens = video("scenes", 10, 50, 256).flatten(0, 1)
    tokens[100], tokens[7:9] = 0, tokens[3]
    exponent = np.random.default_rng(0).integers(low, high + 1, len(tokens))
    exponent[7] = exponent[8] = exponent[3]
    spread = torch.from_numpy(np.ldexp(tokens.double().numpy(), exponent[:, None])).to(dtype)
    rho = density(tokens[None])
    expected = density_guided_fps(tokens.to(dtype), rho, 125).tolist()
    assert density_guided_fps(spread, rho, 125).tolist() == expected
    for dims in (0, 16):
        ours = lazy_density_guided_fps(spread, rho, 125, dims=dims).tolist()
        assert ours == lazy_density_guided_fps(tokens.to(dtype), rho, 125, dims=dims).tolist()
        assert set(ours) == set(expected)


def test_few_products_where_tokens_are_alike_and_no_bound_where_they_are_not() -> None:
    for kind, ratio, most in (("low rank", 0.25, 0.25), ("low rank", 0.1, 0.16), ("scenes", 0.25, 0.25)):
        tokens = video(kind, n_frames=32, per_frame=98, hidden=512)
        counts, budget = lazy.Counts(), int(ratio * 32 * 98)
        lazy_density_guided_fps(tokens.flatten(0, 1), density(tokens), budget, counts=counts)
        assert counts.products < most * 32 * 98 * budget, kind
        assert counts.bounds > 0 and not counts.gave_up
    few = lazy.ConvertedTokens.of(tokens.flatten(0, 1)[:384])
    assert lazy.survey_tokens(few).coordinates is None  # too few tokens for a sample
    tokens, counts = video("random", n_frames=32, per_frame=98, hidden=2048), lazy.Counts()
    lazy_density_guided_fps(tokens.flatten(0, 1), density(tokens), 300, counts=counts)
    assert counts.bounds == 0 < counts.products  # random directions: a bound would tell nothing
    tokens = video("random", n_frames=32, per_frame=98, hidden=512)
    lazy_density_guided_fps(tokens.flatten(0, 1), density(tokens), 600, counts=(given_up := lazy.Counts()), dims=32)
    assert given_up.gave_up


@pytest.mark.parametrize("kind", KINDS)
def test_no_cosine_is_above_its_bound(kind: str) -> None:
    tokens = video(kind, hidden=512).flatten(0, 1).float()
    tokens[5], tokens[7] = 0, tokens[8]
    unit = normalize(tokens.double(), dim=1)
    for dims in (1, 16, 64):
        subspace = lazy.Subspace.of(unit[::2].float(), dims)
        coordinates = subspace.coordinates(tokens, tokens.norm(dim=1).reciprocal().nan_to_num(posinf=0))
        slack = (coordinates @ coordinates.T).double() - unit @ unit.T
        assert slack.min() > -lazy.MARGIN / 3
        assert -1e-6 < subspace.residual <= 1 + 1e-6
    if kind == "low rank":  # else a bound that is always 2 would do
        assert slack.mean() < 0.2


def test_products_of_pairs_without_the_sparse_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = torch.from_numpy(rng.normal(size=(2, 300, 65))).float()
    row, column = np.sort(rng.integers(0, 300, 700)), rng.integers(0, 300, 700)
    expected = (a[row].double() * b[column].double()).sum(dim=1).numpy()
    tokens = video("low rank").flatten(0, 1)
    rho, picks = density(tokens[None]), []
    for has_kernel in (lazy._has_sampled_products(), False):
        monkeypatch.setattr(lazy, "_has_sampled_products", lambda has_kernel=has_kernel: has_kernel)
        assert np.abs(lazy.compute_pair_products(a, b, row, column) - expected).max() < 1e-5
        assert len(lazy.compute_pair_products(a, b, row[:0], column[:0])) == 0
        picks.append(set(lazy_density_guided_fps(tokens, rho, 100).tolist()))
    assert picks[0] == picks[1]


def test_a_large_video_is_pruned_lazily_and_a_small_one_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return lazy_density_guided_fps(*args, **named)

    monkeypatch.setattr(dispatch, "lazy_density_guided_fps", count)
    for n_frames, hidden, lazily in ((24, 512, True), (2, 32, False)):
        calls.clear()
        tokens = video("low rank", n_frames=n_frames, hidden=hidden)
        with defaults(torch.float64, "meta"):  # on which nothing holds values
            pruned = gstep.prune(tokens, 0.25)
        assert bool(calls) == lazily
        expected = density_guided_fps(tokens.flatten(0, 1), density(tokens), len(pruned.index))
        assert pruned.index.tolist() == sorted(expected.tolist())


MEMORY = """
import resource, sys, torch, gstep
tokens = torch.randn(480, 128, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
tokens += 3 * tokens[:1]
gstep.prune(tokens[:16], 0.25)  # what torch loads once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gstep.prune(tokens, 0.1)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (tokens.numel() * 2))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux alone")
def test_memory_stays_below_the_tokens_own_again() -> None:
    done = run_python("-c", MEMORY, check=True, timeout=500)
    assert float(done.stdout) < 1.0


CUDA, CPU, ALL = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None), torch.backends


def put(target: Any, name: str, value: Any) -> Callable[[], None]:
    return partial(setattr, target, name, value)


SETTINGS: dict[str, list[Callable[[], None]]] = {
    "nothing": [],
    **{name: [partial(torch.set_float32_matmul_precision, name)] for name in ("high", "medium", "highest")},
    "allow_tf32": [put(CUDA, "allow_tf32", True)],
    "GPU": [put(CUDA, "fp32_precision", "tf32")],
    "CPU": [put(CPU, "fp32_precision", "bf16")],
    "both": [put(CUDA, "fp32_precision", "tf32"), put(CPU, "fp32_precision", "tf32")],
    "all": [put(ALL, "fp32_precision", "tf32")],
    "old and new": [partial(torch.set_float32_matmul_precision, "medium"), put(CPU, "fp32_precision", "tf32")],
}


def state() -> list[str]:
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return [older, CUDA.fp32_precision, CPU.fp32_precision]


@pytest.fixture
def settings() -> Iterator[None]:
    """The settings are as they were afterwards."""
    if CPU is None:
        pytest.skip("needs torch 2.9")
    yield
    put(ALL, "fp32_precision", "none")()
    torch.set_float32_matmul_precision("highest")
    for target in (CUDA, CPU):
        put(target, "fp32_precision", "none")()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_full_within_and_restored_after(name: str) -> None:
    for change in SETTINGS[name]:
        change()
    before = state()
    for _ in range(2):
        with pytest.raises(KeyError), use_full_precision(), use_full_precision():
            assert set(state()[1:]) <= {"none", "ieee"}
            assert state()[0] == "highest" or name == "old and new"  # torch still tells of no single setting there
            raise KeyError
        assert state() == before
    if name == "all":  # an operator without a setting of its own has none now
        put(ALL, "fp32_precision", "ieee")()
        assert state()[1:] == ["ieee", "ieee"]


@pytest.mark.usefixtures("settings")
def test_threads_leave_the_settings_of_before_the_first() -> None:
    torch.set_float32_matmul_precision("medium")
    entered, leave = threading.Barrier(3), [threading.Event(), threading.Event()]
    seen: list[list[str]] = []

    def work(place: int) -> None:
        with use_full_precision():
            entered.wait()
            leave[place].wait()
            seen.append(state())

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    for thread, event in zip(threads, leave, strict=True):
        assert state() == ["highest", "ieee", "ieee"]
        event.set()
        thread.join()
    assert seen == [["highest", "ieee", "ieee"]] * 2
    assert state() == ["medium", "tf32", "bf16"]


class Bfloat16Products(TorchFunctionMode):
    """What oneDNN does under "medium" on a CPU with bfloat16: it rounds the factors of float32 matrix products."""

    NAMES = frozenset({"__matmul__", "matmul", "mm", "mv"})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.NAMES and CPU.fp32_precision == "bf16":
            args = [a.bfloat16().float() if a.dtype == torch.float32 else a for a in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("hidden", [256, 2048])  # the wide one is sampled lazily
def test_medium_selects_the_same_where_it_means_bfloat16(hidden: int) -> None:
    tokens = video("scenes", 10, 50, hidden).float() * 1.01
    assert (tokens.numel() * 125 > dispatch.MAX_PLAIN_PRODUCTS) == (hidden > 256)
    expected = gstep.prune(tokens)
    torch.set_float32_matmul_precision("medium")
    with Bfloat16Products():
        assert gstep.prune(tokens) == expected
