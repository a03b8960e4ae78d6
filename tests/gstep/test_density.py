"""Each equation of the density against a few lines of float64 numpy written from the paper."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from gstep import density
from gstep.density import ZERO_DISTANCE, compute_cosine_distance, spatio_temporal_density
from tests.gstep.oracle import Array
from tests.gstep.synthetic import FLOATS, needs_cuda

NUMPY_PADDING = {"replicate": "edge", "zero": "constant", "reflect": "reflect", "symmetric": "symmetric"}
NUMPY_PADDING["circular"] = "wrap"


def video(*shape: int, seed: int = 0, offset: float = 0.5) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(offset, 1.0, shape))


def numpy_smooth(change: Array, kernel: Array, boundary: str) -> Array:
    radius = len(kernel) // 2
    if boundary == "renorm":
        return numpy_smooth(change, kernel, "zero") / numpy_smooth(np.ones_like(change), kernel, "zero")
    padded = np.pad(change, radius, mode=NUMPY_PADDING[boundary])  # type: ignore[call-overload]
    return np.correlate(padded, kernel, mode="valid")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 17, 3584), (40, 4, 511), (2, 700, 600), (1, 1, 1)])
def test_mean_and_spatial_density_are_equations_2_and_3_in_blocks_that_change_no_bit(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens = video(*shape).to(dtype)
    before = tokens.clone()
    first, whole = tokens[:, 0].double(), tokens.double()
    mean = first + (whole - first[:, None]).mean(dim=1)
    assert torch.equal(density.compute_frame_means(tokens), mean)
    deviation = torch.linalg.vector_norm(whole - mean[:, None], dim=-1)
    largest = deviation.amax(dim=1, keepdim=True)
    expected = torch.where(largest > 0, deviation / torch.where(largest > 0, largest, 1.0), 0.0)
    assert torch.equal(density.compute_spatial_density(tokens, mean), expected)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_density_depends_neither_on_how_tokens_lie_in_memory_nor_on_the_dtype_of_equal_values(
    dtype: torch.dtype,
) -> None:
    tokens = video(6, 50, 600).to(dtype)
    expected = spatio_temporal_density(tokens.double())
    for order, back in [((0, 1, 2), (0, 1, 2)), ((1, 0, 2), (1, 0, 2)), ((2, 0, 1), (1, 2, 0)), ((0, 2, 1), (0, 2, 1))]:
        other = tokens.permute(order).contiguous().permute(back)
        assert other.is_contiguous() == (order == (0, 1, 2)) and torch.equal(other, tokens)
        for ours, theirs in zip(spatio_temporal_density(other), expected, strict=True):
            assert ours.dtype == torch.float64 and torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_identical_tokens_deviate_by_exactly_0(dtype: torch.dtype, device: str) -> None:
    for n_tokens in (1, 3, 49, 196, 729):
        token = video(4, 1, 33, seed=n_tokens).to(device, dtype)
        tokens = token.expand(4, n_tokens, 33)
        assert torch.equal(density.compute_frame_means(tokens), token[:, 0].double())
        assert (density.compute_spatial_density(tokens, density.compute_frame_means(tokens)) == 0).all()


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2.0**-23), (torch.float64, 2.0**-52)])
def test_a_frame_is_constant_up_to_8_eps_of_its_largest_token(dtype: torch.dtype, eps: float) -> None:
    tokens = torch.zeros(2, 2, 4, dtype=dtype)
    tokens[:, :, 0] = 1
    tokens[0, 0, 1] = 15 * eps  # both tokens of a frame lie half of this from the centre
    tokens[1, 0, 1] = 17 * eps
    spatial = density.compute_spatial_density(tokens, density.compute_frame_means(tokens))
    assert spatial.tolist() == [[0, 0], [1, 1]]


def test_cosine_distance() -> None:
    a, b = video(6, 9), video(6, 9, seed=1)
    expected = [1 - x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in zip(a.numpy(), b.numpy(), strict=True)]
    np.testing.assert_allclose(compute_cosine_distance(a, b), expected, rtol=1e-12)
    unit = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    zero = torch.zeros_like(unit)
    assert compute_cosine_distance(zero, zero).item() == compute_cosine_distance(unit, 3 * unit).item() == 0
    assert compute_cosine_distance(zero, unit).item() == compute_cosine_distance(unit, zero).item() == 1
    assert compute_cosine_distance(unit, -unit).item() == 2
    for distance, expected in [(0.9 * ZERO_DISTANCE, 0.0), (1.1 * ZERO_DISTANCE, 1.1 * ZERO_DISTANCE)]:
        angle = math.acos(1 - distance)
        other = torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        assert compute_cosine_distance(unit, other).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("boundary", density.BOUNDARIES)
def test_smooth_is_equation_6(boundary: str) -> None:
    for n_frames, radius in product((1, 2, 3, 8), (0, 1, 2, 3, 7, 20)):
        change = video(n_frames, seed=radius).abs()
        kernel = density.make_gaussian_kernel(max(1, radius) / 2, radius)
        expected = numpy_smooth(change.numpy(), kernel.numpy(), boundary)
        np.testing.assert_allclose(density.smooth_curve(change, kernel, boundary), expected, rtol=1e-12)


@pytest.mark.parametrize("fusion", density.FUSIONS)
def test_a_static_video_has_no_temporal_density(fusion: str) -> None:
    frame = video(1, 7, 16).float()
    rho, temporal = spatio_temporal_density(frame.expand(5, 7, 16), fusion=fusion)
    assert temporal.tolist() == [0] * 5
    assert density.compute_temporal_density(video(1, 8), eps=10.0).tolist() == [1]  # of a single frame
    assert (rho == 0).all() or fusion == "spatial"


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, 100), (torch.bfloat16, 100), (torch.float64, 900)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_magnitudes_change_nothing(dtype: torch.dtype, exponent: int, sign: int) -> None:
    tokens = video(4, 6, 8).to(dtype)
    extreme = tokens * 2.0 ** (sign * exponent)
    for ours, expected in zip(spatio_temporal_density(extreme), spatio_temporal_density(tokens), strict=True):
        assert torch.equal(ours, expected)


def test_working_copy_is_finite_at_the_ends_of_float32_and_copies_only_where_it_has_to() -> None:
    for value in (3.4e38, 1e-30, 1e-45, 0.0):
        copy = density.scale_to_work_dtype(torch.tensor([value, -value, 0.0]))
        assert torch.isfinite(copy @ copy) and (copy[0] > 0) == (value > 0)
    tokens = video(2, 3, 4).float()
    assert density.scale_to_work_dtype(tokens) is tokens
    assert torch.equal(density.scale_to_work_dtype(tokens.half()), tokens.half().float())


@needs_cuda
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_density_on_cuda(dtype: torch.dtype) -> None:
    tokens = video(6, 50, 64).to(dtype)
    on_cpu, on_cuda = spatio_temporal_density(tokens), spatio_temporal_density(tokens.cuda())
    for ours, expected in zip(on_cuda, on_cpu, strict=True):
        np.testing.assert_allclose(ours.cpu(), expected, rtol=1e-12)
