"""The spatio-temporal density of GSTEP, with one function per equation.

Shapes: K = 2r+1 taps of a kernel of radius r. Everything here is computed in float64 on the tokens' device, because a
selection by argmax must not depend on rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

#: Cosine distances below this, between tokens and between frame centers, count as 0. It is above the rounding noise of
#: float32, which the mean normalization of a static video would amplify, and below any change that matters.
ZERO_DISTANCE = 2e-6

_SAFE_EXPONENT = 40  # binary exponent of a magnitude beyond which sums of squares approach the limits of float32
_COLUMNS = 512  # channels that are summed in float64 at a time: 0.8 MB for 196 tokens

SMOOTHINGS = ("gaussian", "box", "raw")
BOUNDARIES = ("replicate", "zero", "reflect", "symmetric", "renorm", "circular")
FUSIONS = ("full", "temporal", "spatial")


def get_work_dtype(tokens: Tensor) -> torch.dtype:
    """Return the dtype in which products of ``tokens`` are computed: float64 for float64, otherwise float32."""
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32


def compute_working_scale(tokens: Tensor) -> float:
    """Compute a power of two that keeps the square of the largest of ``tokens`` in range.

    The factor is 1.0 if the largest magnitude is 0 or between about 2^-40 and 2^40 (2^-300 and 2^300 for float64).
    Otherwise it brings this magnitude into [1/2, 1), as far as a factor from 2^-126 to 2^126 (2^-1000 to 2^1000) can.
    ``tokens`` are finite and not empty.
    """
    safe, furthest = (300, 1000) if get_work_dtype(tokens) == torch.float64 else (_SAFE_EXPONENT, 126)
    low, high = torch.stack(torch.aminmax(tokens)).tolist()  # one transfer from a GPU, not two
    exponent = math.frexp(max(-low, high))[1]
    return 1.0 if abs(exponent) <= safe else 2.0 ** max(-furthest, min(furthest, -exponent))


def scale_to_work_dtype(tokens: Tensor) -> Tensor:
    """Convert ``tokens`` to their work dtype and multiply them by their working scale, without a copy if possible."""
    scale = compute_working_scale(tokens)
    tokens = tokens.to(get_work_dtype(tokens))
    return tokens if scale == 1.0 else tokens * scale


def compute_row_factors(tokens_MD: Tensor) -> Tensor | None:
    """Compute a power of two for each row that keeps the row's squares in the range of float32: [M] float64, or None.

    A row whose largest magnitude is below 2^-41 or at least 2^40 gets the factor that brings this magnitude into [1/2,
    1), as far as float64 has such a power of two; other rows, and zero rows, get 1. The result is None if all factors
    are 1.
    """
    largest_M = torch.maximum(tokens_MD.amax(dim=1), -tokens_MD.amin(dim=1)).double()
    exponent_M = torch.frexp(largest_M).exponent
    far_M = (exponent_M.abs() > _SAFE_EXPONENT) & (largest_M > 0)
    if not far_M.any():
        return None
    # The power of 2 is built from its bits, because a library function may round it.
    power_M = ((1023 - exponent_M.long().clamp(-1022, 1022)) << 52).view(torch.float64)
    return torch.where(far_M, power_M, 1.0)


def scale_extreme_rows(tokens_MD: Tensor) -> Tensor:
    """Convert ``tokens_MD`` to their work dtype and multiply each row by its factor from ``compute_row_factors``.

    The input itself is returned if it needs neither.
    """
    return scale_rows(tokens_MD, compute_row_factors(tokens_MD))


def scale_rows(tokens_MD: Tensor, factor_M: Tensor | None) -> Tensor:
    """Convert ``tokens_MD`` to their work dtype, each row times its factor, [M] float64; None means factors of 1.

    With None, tokens already in their work dtype are returned as they are.
    """
    dtype = get_work_dtype(tokens_MD)
    return tokens_MD.to(dtype) if factor_M is None else (tokens_MD.double() * factor_M[:, None]).to(dtype)


def iter_row_slices(rows: Tensor) -> Iterator[slice]:
    """Yield slices of the first axis with at most 2^20 elements on a CPU or 2^25 on a GPU, but at least one row."""
    elements = 2**25 if rows.is_cuda else 2**20
    step = max(1, elements // max(1, rows[0].numel()))
    return (slice(start, start + step) for start in range(0, len(rows), step))


def copy_to_float64(tokens: Tensor) -> Tensor:
    """Return a contiguous float64 copy of ``tokens`` that never shares memory with them."""
    return tokens.to(torch.float64, copy=True, memory_format=torch.contiguous_format)


def zero_small_distances(distance: Tensor) -> Tensor:
    """Return ``distance`` with all values below ZERO_DISTANCE, including negative ones, replaced by exactly 0."""
    return distance.masked_fill(distance < ZERO_DISTANCE, 0.0)


def compute_frame_means(tokens_TND: Tensor) -> Tensor:
    """Compute the semantic center of each frame, Eq. (2): [T,N,D] -> [T,D] float64.

    The mean is relative to the frame's first token, so that the center of identical tokens is exactly that token.
    """
    n_frames, _, hidden = tokens_TND.shape
    mean_TD = tokens_TND.new_empty(n_frames, hidden, dtype=torch.float64)
    width = hidden if tokens_TND.is_cuda else _COLUMNS
    for frames in iter_row_slices(tokens_TND):
        for start in range(0, hidden, width):  # a whole frame would not fit in a core's cache
            columns = slice(start, start + width)
            part_TNC = copy_to_float64(tokens_TND[frames, :, columns])
            first_TC = part_TNC[:, 0].clone()
            mean_TD[frames, columns] = part_TNC.sub_(first_TC[:, None]).mean(dim=1).add_(first_TC)
    return mean_TD


def compute_spatial_density(tokens_TND: Tensor, mean_TD: Tensor) -> Tensor:
    """Compute Eq. (3): each token's distance from its frame's center, divided by the largest in the frame.

    A frame is constant if its largest distance is at most 8 eps of the work dtype times its largest token norm, because
    smaller distances are rounding errors.

    Args:
        mean_TD: The frames' centers, [T,D] float64.

    Returns:
        [T,N] float64 in [0, 1]; 0 for all tokens of a constant frame.
    """
    deviation_TN = mean_TD.new_empty(tokens_TND.shape[:2])
    norm_TN = torch.empty_like(deviation_TN)
    for frames in iter_row_slices(tokens_TND):
        for rows in iter_row_slices(
            tokens_TND[frames].transpose(0, 1)
        ):  # a large frame is processed a few tokens at a time
            part_TRD = copy_to_float64(tokens_TND[frames, rows])
            norm_TN[frames, rows] = torch.linalg.vector_norm(part_TRD, dim=-1)
            deviation_TN[frames, rows] = torch.linalg.vector_norm(part_TRD.sub_(mean_TD[frames, None]), dim=-1)
    largest_T1 = deviation_TN.amax(dim=1, keepdim=True)
    constant_T1 = largest_T1 <= 8 * torch.finfo(get_work_dtype(tokens_TND)).eps * norm_TN.amax(dim=1, keepdim=True)
    return torch.where(constant_T1, 0.0, deviation_TN / torch.where(constant_T1, 1.0, largest_T1))


def compute_frame_features(tokens_TND: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the frames' centers and the spatial density, Eqs. (2)-(3), of finite tokens [T,N,D] of any float dtype.

    Returns:
        The centers [T,D], multiplied by the tokens' working scale, and the spatial density [T,N], both float64.
    """
    scale = compute_working_scale(tokens_TND)
    dtype = get_work_dtype(tokens_TND)
    # Allocated before the loop: results allocated between the temporaries of a slice would keep their memory in use.
    mean_TD = tokens_TND.new_empty(tokens_TND[:, 0].shape, dtype=torch.float64)
    spatial_TN = tokens_TND.new_empty(tokens_TND.shape[:2], dtype=torch.float64)
    for frames in iter_row_slices(tokens_TND):  # scaled slice by slice; a copy of all tokens would double the memory
        part_TND = tokens_TND[frames] if scale == 1.0 else tokens_TND[frames].to(dtype) * scale
        mean_TD[frames] = compute_frame_means(part_TND)
        spatial_TN[frames] = compute_spatial_density(part_TND, mean_TD[frames])
    return mean_TD, spatial_TN


def compute_cosine_distance(a_XD: Tensor, b_XD: Tensor) -> Tensor:
    """Compute d(a, b) = 1 - cos(a, b) of each pair of rows, [X,D] and [X,D] -> [X]; 0 below ZERO_DISTANCE.

    Two zero rows have distance 0; a zero row and any other row have distance 1.
    """
    norm_a = torch.linalg.vector_norm(a_XD, dim=-1)
    norm_b = torch.linalg.vector_norm(b_XD, dim=-1)
    return convert_products_to_distances((a_XD * b_XD).sum(dim=-1), norm_a, norm_b)


def convert_products_to_distances(product: Tensor, norm_a: Tensor, norm_b: Tensor) -> Tensor:
    """Compute cosine distances from the inner products of pairs of rows and both rows' norms, all of the same shape.

    Distances below ZERO_DISTANCE are 0. If both norms are 0, the distance is 0; if only one is, it is 1.
    """
    norms = norm_a * norm_b
    cosine = product / torch.where(norms > 0, norms, 1.0)
    return zero_small_distances(torch.where((norm_a == 0) & (norm_b == 0), 0.0, 1 - cosine))


def compute_change_curve(mean_TD: Tensor) -> Tensor:
    """Compute the raw change curve c, Eq. (4), [T,D] -> [T]: each frame center's mean cosine distance to its neighbors.

    A single frame gets 0.
    """
    if len(mean_TD) == 1:
        return mean_TD.new_zeros(1)
    step = compute_cosine_distance(mean_TD[:-1], mean_TD[1:])
    return torch.cat([step[:1], 0.5 * step[:-1] + 0.5 * step[1:], step[-1:]])


def make_gaussian_kernel(sigma: float, radius: int | None = None) -> Tensor:
    """Compute the truncated Gaussian kernel of Eq. (5), normalized to sum 1: [2r+1] float64 on the CPU.

    ``sigma`` is the standard deviation in frames; ``radius`` None means ceil(3 * sigma).
    """
    radius = math.ceil(3 * sigma) if radius is None else radius
    offset_K = torch.arange(-radius, radius + 1, dtype=torch.float64, device="cpu")
    weight_K = torch.exp(-0.5 * (offset_K / sigma) ** 2)
    return weight_K / weight_K.sum()


def make_box_kernel(radius: int | None = None) -> Tensor:
    """Compute the fixed window of the smoothing ablation: 2r+1 equal weights with sum 1, float64 on the CPU.

    ``radius`` None means 1.
    """
    taps = 2 * (1 if radius is None else radius) + 1
    return torch.full((taps,), 1.0 / taps, dtype=torch.float64, device="cpu")


def map_to_source_frame(position: Tensor, n_frames: int, boundary: str) -> Tensor:
    """Map each frame position, inside or outside [0, T), to the frame that the boundary rule puts there.

    Args:
        boundary: "reflect" (mirrored without repeating the edge frame), "symmetric" (mirrored with the edge frame
            repeated) or "circular", which all continue without limit. Any other value gives the nearest frame.
    """
    if boundary == "circular":
        return position % n_frames
    if boundary == "symmetric":
        folded = position % (2 * n_frames)  # 0 1 2 2 1 0 | 0 1 2 ...
        return torch.minimum(folded, 2 * n_frames - 1 - folded)
    if boundary == "reflect":
        period = max(1, 2 * (n_frames - 1))  # 0 1 2 1 | 0 1 2 ...
        folded = position % period
        return torch.minimum(folded, period - folded) if n_frames > 1 else torch.zeros_like(position)
    return position.clamp(0, n_frames - 1)


def smooth_curve(change_T: Tensor, kernel_K: Tensor, boundary: str = "replicate") -> Tensor:
    """Smooth the change curve with a kernel of odd length, Eq. (6), [T] -> [T].

    Args:
        boundary: What lies beyond the ends of the curve: "zero", "renorm" (zero, with the result divided by the
            kernel's mass inside the video), or a rule of ``map_to_source_frame``.
    """
    n_frames = len(change_T)
    radius = len(kernel_K) // 2
    kernel_K = kernel_K.to(change_T)
    frame_T1 = torch.arange(n_frames, device=change_T.device)[:, None]
    position_TK = frame_T1 + torch.arange(-radius, radius + 1, device=change_T.device)
    # For zero and renorm, positions are clamped here too; values outside are masked below.
    smoothed_TK = change_T[map_to_source_frame(position_TK, n_frames, boundary)] * kernel_K
    if boundary not in ("zero", "renorm"):
        return smoothed_TK.sum(dim=1)
    inside_TK = (position_TK >= 0) & (position_TK < n_frames)
    smoothed_T = torch.where(inside_TK, smoothed_TK, 0.0).sum(dim=1)
    return smoothed_T / (inside_TK * kernel_K).sum(dim=1) if boundary == "renorm" else smoothed_T


def normalize_by_mean(smoothed_T: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the mean, Eq. (7): b / (mean(b) + eps), for a tensor of any shape; a tensor of zeros stays zero."""
    return smoothed_T / (smoothed_T.mean() + eps)


def compute_temporal_density(
    mean_TD: Tensor,
    *,
    smoothing: str = "gaussian",
    sigma: float = 1.0,
    radius: int | None = None,
    boundary: str = "replicate",
    eps: float = 1e-6,
) -> Tensor:
    """Compute the normalized temporal density of each frame, Eqs. (4)-(7): centers [T,D] -> [T].

    A single frame has density 1. All frames of a static video have density 0.

    Args:
        smoothing: "gaussian", "box", or any other value for none, which ignores ``radius`` and ``boundary``.
        sigma: The standard deviation in frames, only for gaussian smoothing.
        radius: In frames; None means ceil(3 * sigma) for gaussian and 1 for box.
        boundary: A rule of ``smooth_curve``.
        eps: Added to the mean in Eq. (7).
    """
    if len(mean_TD) == 1:
        return mean_TD.new_ones(1)
    curve_T = compute_change_curve(mean_TD)
    if smoothing == "gaussian":
        curve_T = smooth_curve(curve_T, make_gaussian_kernel(sigma, radius), boundary)
    elif smoothing == "box":
        curve_T = smooth_curve(curve_T, make_box_kernel(radius), boundary)
    return normalize_by_mean(curve_T, eps)


def fuse_densities(temporal_T: Tensor, spatial_TN: Tensor, fusion: str = "full") -> Tensor:
    """Multiply the temporal density [T] and the spatial density [T,N] to get rho [T,N], Eq. (8).

    ``fusion`` "temporal" or "spatial" returns a view of that factor alone; any other value means the product.
    """
    if fusion == "spatial":
        return spatial_TN
    temporal_TN = temporal_T[:, None].expand_as(spatial_TN)
    return temporal_TN if fusion == "temporal" else temporal_TN * spatial_TN


def spatio_temporal_density(
    tokens_TND: Tensor,
    *,
    smoothing: str = "gaussian",
    sigma: float = 1.0,
    radius: int | None = None,
    boundary: str = "replicate",
    fusion: str = "full",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Compute rho [T,N] and the temporal density [T], Eqs. (2)-(8), of finite tokens [T,N,D], both float64.

    The parameters are those of ``compute_temporal_density`` and ``fuse``, and are not checked.
    """
    mean_TD, spatial_TN = compute_frame_features(tokens_TND)
    temporal_T = compute_temporal_density(
        mean_TD, smoothing=smoothing, sigma=sigma, radius=radius, boundary=boundary, eps=eps
    )
    return fuse_densities(temporal_T, spatial_TN, fusion), temporal_T
