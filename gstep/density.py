"""The spatio-temporal density of GSTEP: a function for each equation.

Shapes: T frames, N tokens a frame, D hidden size, K = 2r+1 taps of a kernel of radius r. Everything here is computed in
float64 on the tokens' device: the results are small, and a selection by argmax must not follow rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

#: Smaller cosine distances, between tokens and between frame centres, count as 0. It lies above the rounding noise of
#: float32, which the mean normalisation of a static video would amplify, and below any change that matters.
ZERO_DISTANCE = 2e-6

_SAFE_EXPONENT = 40  # exponent of 2 beyond which sums of squares approach the limits of float32
_COLUMNS = 512  # channels that are summed at a time in float64: 0.8 MB for 196 tokens

SMOOTHINGS = ("gaussian", "box", "raw")
BOUNDARIES = ("replicate", "zero", "reflect", "symmetric", "renorm", "circular")
FUSIONS = ("full", "temporal", "spatial")


def work_dtype(tokens: Tensor) -> torch.dtype:
    """Return the dtype to compute products of tokens in: float64 for float64, else float32 (exact for 16 bits)."""
    return torch.float64 if tokens.dtype == torch.float64 else torch.float32


def working_scale(tokens: Tensor) -> float:
    """Compute a power of two as a factor for finite ``tokens``, so that their squares neither overflow nor vanish.

    It is 1 unless the largest magnitude is near the limits of their work dtype. Neither cosines nor the spatial density
    depend on it.
    """
    safe, furthest = (300, 1000) if work_dtype(tokens) == torch.float64 else (_SAFE_EXPONENT, 126)
    low, high = torch.stack(torch.aminmax(tokens)).tolist()  # one transfer from a GPU, not two
    exponent = math.frexp(max(-low, high))[1]
    return 1.0 if abs(exponent) <= safe else 2.0 ** max(-furthest, min(furthest, -exponent))


def working_copy(tokens: Tensor) -> Tensor:
    """Convert ``tokens``, of any shape, to their work dtype and multiply by their working scale; no needless copy."""
    scale = working_scale(tokens)
    tokens = tokens.to(work_dtype(tokens))
    return tokens if scale == 1.0 else tokens * scale


def row_factors(tokens_MD: Tensor) -> Tensor | None:
    """Compute a power of two for each row, [M] float64, that keeps squares in the range of float32; None if all are 1.

    The factor brings the largest magnitude of an out-of-range row into [1/2, 1); other rows have 1. Out of range are
    16-bit and float32 rows whose squares leave float32, and float64 rows that leave it themselves. Powers of two are
    exact, and cosines do not depend on them.
    """
    largest_M = torch.maximum(tokens_MD.amax(dim=1), -tokens_MD.amin(dim=1)).double()
    exponent_M = torch.frexp(largest_M).exponent
    far_M = (exponent_M.abs() > _SAFE_EXPONENT) & (largest_M > 0)
    if not far_M.any():
        return None
    # The power of 2 is made of its bits, since a library function may round it.
    power_M = ((1023 - exponent_M.long().clamp(-1022, 1022)) << 52).view(torch.float64)
    return torch.where(far_M, power_M, 1.0)


def level_copy(tokens_MD: Tensor) -> Tensor:
    """Convert ``tokens_MD`` to their work dtype and multiply by their ``row_factors``; no needless copy."""
    return scale_rows(tokens_MD, row_factors(tokens_MD))


def scale_rows(tokens_MD: Tensor, factor_M: Tensor | None) -> Tensor:
    """Convert ``tokens_MD`` to their work dtype, each row times its factor."""
    dtype = work_dtype(tokens_MD)
    return tokens_MD.to(dtype) if factor_M is None else (tokens_MD.double() * factor_M[:, None]).to(dtype)


def row_slices(rows: Tensor) -> Iterator[slice]:
    """Yield slices along the first axis, so small that float64 intermediates fit a CPU's cache or spare GPU memory."""
    elements = 2**25 if rows.is_cuda else 2**20
    step = max(1, elements // max(1, rows[0].numel()))
    return (slice(start, start + step) for start in range(0, len(rows), step))


def float64_copy(tokens: Tensor) -> Tensor:
    """Copy tokens to contiguous float64, for work in place."""
    return tokens.to(torch.float64, copy=True, memory_format=torch.contiguous_format)


def floor_distance(distance: Tensor) -> Tensor:
    """Set cosine distances below ZERO_DISTANCE, negative distances too, to exactly 0."""
    return distance.masked_fill(distance < ZERO_DISTANCE, 0.0)


def frame_mean(tokens_TND: Tensor) -> Tensor:
    """Compute the semantic centre of each frame, Eq. (2): [T,N,D] -> [T,D] float64.

    The mean is taken relative to the frame's first token, so that the centre of identical tokens is that token exactly.
    """
    n_frames, _, hidden = tokens_TND.shape
    mean_TD = tokens_TND.new_empty(n_frames, hidden, dtype=torch.float64)
    width = hidden if tokens_TND.is_cuda else _COLUMNS
    for frames in row_slices(tokens_TND):
        for start in range(0, hidden, width):  # a whole frame would not fit into a core's cache
            columns = slice(start, start + width)
            part_TNC = float64_copy(tokens_TND[frames, :, columns])
            first_TC = part_TNC[:, 0].clone()
            mean_TD[frames, columns] = part_TNC.sub_(first_TC[:, None]).mean(dim=1).add_(first_TC)
    return mean_TD


def spatial_density(tokens_TND: Tensor, mean_TD: Tensor) -> Tensor:
    """Compute Eq. (3): each token's distance to its frame's centre over the frame's largest, [T,N] float64 in [0, 1].

    All tokens of a constant frame have 0. A frame is constant if its largest deviation is at most 8 eps of the work
    dtype times its largest token norm. Smaller deviations are rounding errors.
    """
    deviation_TN = mean_TD.new_empty(tokens_TND.shape[:2])
    norm_TN = torch.empty_like(deviation_TN)
    for frames in row_slices(tokens_TND):
        for rows in row_slices(tokens_TND[frames].transpose(0, 1)):  # a large frame is summed some tokens at a time
            part_TRD = float64_copy(tokens_TND[frames, rows])
            norm_TN[frames, rows] = torch.linalg.vector_norm(part_TRD, dim=-1)
            deviation_TN[frames, rows] = torch.linalg.vector_norm(part_TRD.sub_(mean_TD[frames, None]), dim=-1)
    largest_T1 = deviation_TN.amax(dim=1, keepdim=True)
    constant_T1 = largest_T1 <= 8 * torch.finfo(work_dtype(tokens_TND)).eps * norm_TN.amax(dim=1, keepdim=True)
    return torch.where(constant_T1, 0.0, deviation_TN / torch.where(constant_T1, 1.0, largest_T1))


def describe_frames(tokens_TND: Tensor) -> tuple[Tensor, Tensor]:
    """Compute frame centres and spatial density, Eqs. (2)-(3), of finite tokens [T,N,D] of any float dtype.

    Returns the centres [T,D] multiplied by the tokens' working scale, and the density [T,N], both float64.
    """
    scale, dtype = working_scale(tokens_TND), work_dtype(tokens_TND)
    # Allocated before the slices: results among the temporaries of a slice would keep the temporaries from being freed.
    mean_TD = tokens_TND.new_empty(tokens_TND[:, 0].shape, dtype=torch.float64)
    spatial_TN = tokens_TND.new_empty(tokens_TND.shape[:2], dtype=torch.float64)
    for frames in row_slices(tokens_TND):  # scaled slice by slice in the cache; a whole copy would double the memory
        part_TND = tokens_TND[frames] if scale == 1.0 else tokens_TND[frames].to(dtype) * scale
        mean_TD[frames] = frame_mean(part_TND)
        spatial_TN[frames] = spatial_density(part_TND, mean_TD[frames])
    return mean_TD, spatial_TN


def cosine_distance(a_XD: Tensor, b_XD: Tensor) -> Tensor:
    """Compute d(a, b) = 1 - cos(a, b) of each pair of rows, [X,D] x 2 -> [X], 0 below ZERO_DISTANCE.

    A zero row has cosine 0 with every row except another zero row, at distance 0.
    """
    norm_a, norm_b = torch.linalg.vector_norm(a_XD, dim=-1), torch.linalg.vector_norm(b_XD, dim=-1)
    return distance_of_products((a_XD * b_XD).sum(dim=-1), norm_a, norm_b)


def distance_of_products(product: Tensor, norm_a: Tensor, norm_b: Tensor) -> Tensor:
    """Compute the cosine distance from the inner product of two rows and their norms, all of one shape."""
    norms = norm_a * norm_b
    cosine = product / torch.where(norms > 0, norms, 1.0)
    return floor_distance(torch.where((norm_a == 0) & (norm_b == 0), 0.0, 1 - cosine))


def centred_change(mean_TD: Tensor) -> Tensor:
    """Compute the raw change curve c, Eq. (4), [T,D] -> [T]: each frame centre's mean distance to its neighbours.

    The first and the last frame have one neighbour; a single frame has none and changes by 0.
    """
    if len(mean_TD) == 1:
        return mean_TD.new_zeros(1)
    step = cosine_distance(mean_TD[:-1], mean_TD[1:])
    return torch.cat([step[:1], 0.5 * step[:-1] + 0.5 * step[1:], step[-1:]])


def gaussian_kernel(sigma: float, radius: int | None = None) -> Tensor:
    """Compute the truncated Gaussian kernel of Eq. (5), normalised to sum 1: [2r+1] float64.

    ``sigma`` is in frames; the radius r is ceil(3 sigma) by default.
    """
    radius = math.ceil(3 * sigma) if radius is None else radius
    offset_K = torch.arange(-radius, radius + 1, dtype=torch.float64, device="cpu")
    weight_K = torch.exp(-0.5 * (offset_K / sigma) ** 2)
    return weight_K / weight_K.sum()


def box_kernel(radius: int | None = None) -> Tensor:
    """Compute the fixed window of the smoothing ablation: 2r+1 equal weights of sum 1, float64; r = 1 by default."""
    taps = 2 * (1 if radius is None else radius) + 1
    return torch.full((taps,), 1.0 / taps, dtype=torch.float64, device="cpu")


def source_frame(position: Tensor, n_frames: int, boundary: str) -> Tensor:
    """Map each position, inside or outside [0, T), to the frame that the boundary rule puts there; int64, same shape.

    reflect (edge not repeated), symmetric (edge repeated) and circular continue periodically without limit. Any other
    rule gives the nearest frame.
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


def smooth(change_T: Tensor, kernel_K: Tensor, boundary: str = "replicate") -> Tensor:
    """Smooth the change curve by a kernel of odd length, Eq. (6), [T] -> [T].

    ``boundary`` names what lies beyond the ends: replicate (the end frame), zero, renorm (zero, divided by the kernel's
    mass inside the video), reflect, symmetric or circular.
    """
    n_frames, radius = len(change_T), len(kernel_K) // 2
    kernel_K = kernel_K.to(change_T)
    frame_T1 = torch.arange(n_frames, device=change_T.device)[:, None]
    position_TK = frame_T1 + torch.arange(-radius, radius + 1, device=change_T.device)
    # zero and renorm clamp positions too; values outside are masked below.
    smoothed_TK = change_T[source_frame(position_TK, n_frames, boundary)] * kernel_K
    if boundary not in ("zero", "renorm"):
        return smoothed_TK.sum(dim=1)
    inside_TK = (position_TK >= 0) & (position_TK < n_frames)
    smoothed_T = torch.where(inside_TK, smoothed_TK, 0.0).sum(dim=1)
    return smoothed_T / (inside_TK * kernel_K).sum(dim=1) if boundary == "renorm" else smoothed_T


def mean_normalise(smoothed_T: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the mean, Eq. (7): b / (mean(b) + eps), [T] -> [T]."""
    return smoothed_T / (smoothed_T.mean() + eps)


def temporal_density(
    mean_TD: Tensor,
    *,
    smoothing: str = "gaussian",
    sigma: float = 1.0,
    radius: int | None = None,
    boundary: str = "replicate",
    eps: float = 1e-6,
) -> Tensor:
    """Compute the normalised temporal density of each frame, Eqs. (4) to (7): [T,D] -> [T].

    A single frame has density 1. ``sigma`` is for gaussian smoothing alone. Raw smoothing ignores ``radius`` and
    ``boundary``, too.
    """
    if len(mean_TD) == 1:
        return mean_TD.new_ones(1)
    curve_T = centred_change(mean_TD)
    if smoothing == "gaussian":
        curve_T = smooth(curve_T, gaussian_kernel(sigma, radius), boundary)
    elif smoothing == "box":
        curve_T = smooth(curve_T, box_kernel(radius), boundary)
    return mean_normalise(curve_T, eps)


def fuse(temporal_T: Tensor, spatial_TN: Tensor, fusion: str = "full") -> Tensor:
    """Multiply temporal [T] and spatial density [T,N] into rho [T,N], Eq. (8).

    ``fusion`` "temporal" or "spatial" leaves the other factor out: the result is then a view of the argument.
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
    """Compute rho [T,N] and the temporal density [T], Eqs. (2)-(8), float64, of finite tokens [T,N,D].

    The parameters are the parameters of ``temporal_density`` and ``fuse``. The values of SMOOTHINGS, BOUNDARIES and
    FUSIONS are allowed; they are not checked here.
    """
    mean_TD, spatial_TN = describe_frames(tokens_TND)
    temporal_T = temporal_density(mean_TD, smoothing=smoothing, sigma=sigma, radius=radius, boundary=boundary, eps=eps)
    return fuse(temporal_T, spatial_TN, fusion), temporal_T
