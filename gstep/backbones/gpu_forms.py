"""Faster implementations of the stock vision towers for GPUs, with the same arithmetic in other layouts and kernels.

They modify the modules of one loaded tower, never a class of transformers.

Shapes: F frames, S rows (patches of a pass), C channels, H heads of E channels, I inner channels of an MLP.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, linear, pad, scaled_dot_product_attention, silu

from gstep.backbones.runtime import apply_rotary_positions

_TANH_GELU = "gelu_pytorch_tanh"  # transformers' name for it
_ALIGNED = 8  # channels, 16 bytes: for other widths cuBLAS uses kernels of older GPUs
_INNER_MULTIPLE = 128  # channels of a padded MLP: the tile size of the product
_CHECKED_ROWS = 40  # rows on which kernels are compared with torch
_TOLERANCE = 2.0**-6  # relative to the largest value: two bfloat16 roundings


class FusedSteps:
    """The element-wise steps of one tower, by Triton kernels where they work on its device, otherwise by torch.

    The layers of the tower share it.

    Attributes:
        kernels: True if Triton kernels compute the steps; :meth:`check_kernels_on` sets it.
    """

    def __init__(self, *, kernels: bool = False) -> None:
        self.kernels = kernels

    def check_kernels_on(self, device: torch.device, step: Callable[[], Tensor]) -> None:
        """Turn the Triton kernels on if ``step`` gives the same result with and without them.

        If ``step`` fails, or its results differ by more than 1/64 of the largest value, the kernels stay off and a
        RuntimeWarning has the reason.

        Args:
            device: a CUDA device.
            step: runs a layer that uses these steps; called twice.

        Raises:
            torch.OutOfMemoryError: GPU memory ran out in ``step``.
        """
        try:
            with torch.cuda.device(device):
                self.kernels = False
                expected = step().float()
                self.kernels = True
                error = (step().float() - expected).abs().max()
                if not error <= _TOLERANCE * expected.abs().max():
                    raise RuntimeError(
                        f"results are off by {float(error):.3g} at values up to {float(expected.abs().max()):.3g}"
                    )
        except torch.OutOfMemoryError:
            self.kernels = False  # nothing was compared
            raise
        except Exception as error:  # noqa: BLE001 - torch's own operations still work
            self.kernels = False
            warnings.warn(
                f"the vision tower's Triton kernels do not work on {device} ({type(error).__name__}: {error}). "
                "Torch's slower operations are used instead",
                RuntimeWarning,
                stacklevel=2,
            )

    def norm(self, norm: Any, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add ``added`` to x if it is given, and normalize the sum by ``norm``, a LayerNorm or RMSNorm module.

        Returns:
            (x + ``added``, its norm), both [...,C]; without ``added`` the first item is x itself (contiguous with
            kernels).
        """
        if not self.kernels:
            x = x if added is None else x + added
            return x, norm(x)
        from gstep.backbones.gpu_kernels import norm_kernel  # noqa: PLC0415 - Triton may be missing

        width = x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        addend = x if added is None else added.contiguous()
        is_layer_norm = isinstance(norm, nn.LayerNorm)
        bias, eps = (norm.bias, norm.eps) if is_layer_norm else (norm.weight, norm.variance_epsilon)
        n_rows = x.numel() // width
        rows = 2
        norm_kernel[(-(-n_rows // rows),)](
            *(x, addend, total, out, norm.weight, bias, n_rows, eps, width, _round_up_to_power_of_2(width), rows),
            *(added is not None, is_layer_norm),
            num_warps=8,
        )
        return total, out

    def rotate(self, qkv_S3HE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``qkv_S3HE`` into queries, keys and values [S,H,E], and apply rotary positions to the queries and keys.

        With kernels, ``qkv_S3HE`` is modified in place and the results are views of it.
        """
        query, key, value = qkv_S3HE.unbind(1)
        if not self.kernels:
            cos_S1E, sin_S1E = cos_SE[:, None], sin_SE[:, None]
            query, key = (
                apply_rotary_positions(part.float(), cos_S1E, sin_S1E).to(part.dtype) for part in (query, key)
            )
            return query, key, value
        from gstep.backbones.gpu_kernels import rotate_kernel  # noqa: PLC0415

        n_rows, _, heads, width = qkv_S3HE.shape
        rotate_kernel[(n_rows,)](
            *(qkv_S3HE, cos_SE.float().contiguous(), sin_SE.float().contiguous(), heads, width // 2),
            *(_round_up_to_power_of_2(2 * heads), _round_up_to_power_of_2(width // 2)),
            num_warps=4,
            enable_fp_fusion=False,
        )
        return query, key, value

    def gate(self, gate_up_S2I: Tensor) -> Tensor:
        """Return SiLU(gate) * up, [S,I], for rows that hold the gate and then up."""
        width = gate_up_S2I.shape[-1] // 2
        if not self.kernels:
            gated: Tensor = silu(gate_up_S2I[..., :width]) * gate_up_S2I[..., width:]
            return gated
        from gstep.backbones.gpu_kernels import gate_kernel  # noqa: PLC0415

        out_SI = gate_up_S2I.new_empty(len(gate_up_S2I), width)
        block = min(1024, _round_up_to_power_of_2(width))
        gate_kernel[(len(gate_up_S2I), -(-width // block))](gate_up_S2I, out_SI, width, block, num_warps=4)
        return out_SI

    def apply_gelu_linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the tanh GELU of a linear layer's output.

        With kernels on a GPU, GELU is applied before the product is rounded.
        """
        if not (self.kernels and x.is_cuda):
            return gelu(layer(x), approximate="tanh")
        flat = x.flatten(0, -2)
        out: Tensor = torch._addmm_activation(layer.bias, flat, layer.weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], -1)


def _round_up_to_power_of_2(least: int) -> int:
    """Return the smallest power of 2 that is at least ``least``."""
    return 1 << (least - 1).bit_length()


def optimize_llava(model: Any, vision: Any) -> FusedSteps:
    """Modify a loaded LlavaOnevisionModel in place to run faster on a GPU, and return the fused steps of its layers.

    Patches are embedded by one matrix product, element-wise steps are fused, and pooling keeps the channels last. On a
    GPU, the first layer then runs twice to turn the Triton kernels on, or off with a RuntimeWarning
    (:meth:`FusedSteps.check_kernels_on`).

    Args:
        vision: the module inside ``model`` that holds the vision tower's embeddings and layers.

    Raises:
        torch.OutOfMemoryError: GPU memory ran out in the first layer.
    """
    steps = FusedSteps()
    embeddings = vision.embeddings
    kernel_CK = _flatten_kernel(embeddings.patch_embedding)
    embeddings.forward = partial(_embed_siglip, embeddings, kernel_CK)
    for layer in vision.encoder.layers:
        layer.forward = partial(_run_siglip_layer, layer, steps)
        if vision.config.hidden_act == _TANH_GELU:
            layer.mlp.forward = partial(_run_tanh_mlp, steps, layer.mlp.fc1, layer.mlp.fc2)
    model.apply_pooling = MethodType(_pool_frames, model)
    if kernel_CK.is_cuda:
        first = vision.encoder.layers[0]
        hidden_1SC = _draw_hidden_states(first.layer_norm1.weight)[None]
        steps.check_kernels_on(kernel_CK.device, lambda: first(hidden_1SC, attention_mask=None))
    return steps


def optimize_internvl(tower: Any) -> FusedSteps:
    """Modify a loaded InternVLVisionModel in place to run faster on a GPU, and return the fused steps of its layers.

    Patches are embedded by one matrix product, and norms are fused. If attention is sdpa without norms of queries and
    keys, their projections and that of values become one product. The scales ``lambda_1`` and ``lambda_2`` of each
    layer are multiplied into the weights before them and set to 1, so that a second call changes no result. On a GPU,
    the first layer then runs twice to turn the Triton kernels on, or off with a RuntimeWarning
    (:meth:`FusedSteps.check_kernels_on`).

    Raises:
        torch.OutOfMemoryError: GPU memory ran out in the first layer.
    """
    steps = FusedSteps()
    patches = tower.embeddings.patch_embeddings
    kernel_CK = _flatten_kernel(patches.projection)
    patches.forward = partial(_embed_internvl, patches, kernel_CK)
    for layer in tower.encoder.layer:
        _fold_scale(layer.attention.projection_layer, layer.lambda_1)
        _fold_scale(layer.mlp.fc2, layer.lambda_2)
        layer.forward = partial(_run_internvl_layer, layer, steps)
        if tower.config._attn_implementation == "sdpa" and not tower.config.use_qk_norm:
            attention = layer.attention
            joined = _join_layers((attention.q_proj, attention.k_proj, attention.v_proj))
            attention.forward = partial(_attend_to_frame, attention, joined)
    if kernel_CK.is_cuda:
        first = tower.encoder.layer[0]
        hidden_1SC = _draw_hidden_states(first.layernorm_before.weight)[None]
        steps.check_kernels_on(kernel_CK.device, lambda: first(hidden_1SC))
    return steps


def optimize_qwen(tower: Any) -> FusedSteps:
    """Modify a loaded vision tower of Qwen2.5-VL or Qwen3-VL in place to run faster on a GPU; return its fused steps.

    Patches are embedded by one matrix product, element-wise steps are fused, and each layer attends in as few calls as
    possible; attention stays the stock one if the tower was built with "eager". The gate and up of an MLP gated by SiLU
    become one product; a width that is not a multiple of 8 is zero-padded to a multiple of 128. On a GPU, the first
    block then runs twice to turn the Triton kernels on, or off with a RuntimeWarning
    (:meth:`FusedSteps.check_kernels_on`).

    Raises:
        torch.OutOfMemoryError: GPU memory ran out in the first block.
    """
    steps = FusedSteps()
    projection = tower.patch_embed.proj
    tower.patch_embed.forward = partial(_embed_rows, projection)
    for block in tower.blocks:
        block.forward = partial(_run_qwen_block, block, steps)
        if tower.config._attn_implementation != "eager":
            block.attn.forward = partial(_attend_in_pieces, block.attn, steps)
        if hasattr(block.mlp, "gate_proj"):
            if tower.config.hidden_act == "silu":
                block.mlp.forward = partial(_run_gated_mlp, steps, _join_gate_and_up(block.mlp), block.mlp.down_proj)
        elif tower.config.hidden_act == _TANH_GELU:
            block.mlp.forward = partial(_run_tanh_mlp, steps, block.mlp.linear_fc1, block.mlp.linear_fc2)
    if projection.weight.is_cuda:
        first = tower.blocks[0]
        device = projection.weight.device
        rows = _CHECKED_ROWS
        hidden_SC = _draw_hidden_states(first.norm1.weight)
        angle_SE = torch.linspace(0.0, 3.0, rows, device=device)[:, None].expand(-1, first.attn.head_dim)
        bounds = torch.tensor([0, rows], dtype=torch.int32, device=device)
        piece = {"cu_seqlens": bounds, "max_seqlen": rows, "position_embeddings": (angle_SE.cos(), angle_SE.sin())}
        steps.check_kernels_on(device, lambda: first(hidden_SC, **piece))
    return steps


def _draw_hidden_states(like: Tensor) -> Tensor:
    """Draw seeded hidden states [40,C] for a layer whose norm has the weight ``like``, in its dtype on its device."""
    seeded = torch.Generator("cpu").manual_seed(0)
    return torch.randn(_CHECKED_ROWS, len(like), generator=seeded, device="cpu").to(like.device, like.dtype)


def _flatten_kernel(convolution: nn.Conv2d) -> Tensor:
    """Return the weights of a patch embedding as rows [C,K], zero-padded to a K that is a multiple of 8."""
    kernel_CK = convolution.weight.flatten(1)
    return pad(kernel_CK, (0, -kernel_CK.shape[1] % _ALIGNED))


def _embed_patches(pixels_F3hw: Tensor, kernel_CK: Tensor, bias_C: Tensor | None, patch: int) -> Tensor:
    """Embed the square patches of each frame by one matrix product: [F,S,C], contiguous."""
    pixels = pixels_F3hw.to(kernel_CK.dtype)
    blocks = pixels.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5)
    patches_FSK = blocks.reshape(len(pixels), blocks.shape[1] * blocks.shape[2], -1)
    return linear(pad(patches_FSK, (0, kernel_CK.shape[1] - patches_FSK.shape[2])), kernel_CK, bias_C)


def _embed_siglip(
    embeddings: Any, kernel_CK: Tensor, pixel_values: Tensor, interpolate_pos_encoding: bool = False
) -> Tensor:
    """Replace SiglipVisionEmbeddings.forward for [F,3,h,w]; position embeddings are never interpolated."""
    embedded = _embed_patches(pixel_values, kernel_CK, embeddings.patch_embedding.bias, embeddings.patch_size)
    positions: Tensor = embeddings.position_embedding(embeddings.position_ids)
    return embedded + positions


def _embed_internvl(patches: Any, kernel_CK: Tensor, pixel_values: Tensor) -> Tensor:
    """Replace InternVLVisionPatchEmbeddings.forward for [F,3,h,w]."""
    return _embed_patches(pixel_values, kernel_CK, patches.projection.bias, patches.patch_size[0])


def _embed_rows(projection: Any, hidden_states: Tensor) -> Tensor:
    """Replace the patch embedding of a Qwen tower, a convolution over flattened patches [S,K], by a matrix product."""
    weight_CK = projection.weight.flatten(1)
    return linear(hidden_states.to(weight_CK.dtype), weight_CK, projection.bias)


def _run_siglip_layer(
    layer: Any, steps: FusedSteps, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Replace SiglipEncoderLayer.forward, with the residual additions fused into the norms."""
    _, normed = steps.norm(layer.layer_norm1, hidden_states)
    attended, _ = layer.self_attn(hidden_states=normed, attention_mask=attention_mask, **options)
    hidden_states, normed = steps.norm(layer.layer_norm2, hidden_states, attended)
    output: Tensor = hidden_states + layer.mlp(normed)
    return output


def _run_internvl_layer(layer: Any, steps: FusedSteps, hidden_states: Tensor) -> Tensor:
    """Replace InternVLVisionLayer.forward for a layer whose scales were multiplied into its weights."""
    _, normed = steps.norm(layer.layernorm_before, hidden_states)
    attended, _ = layer.attention(normed)
    hidden_states, normed = steps.norm(layer.layernorm_after, hidden_states, attended)
    output: Tensor = hidden_states + layer.mlp(normed)
    return output


def _fold_scale(product: nn.Linear, scale_C: Tensor) -> None:
    """Multiply a layer's weight and bias by ``scale_C`` and set the scale to 1, all in place."""
    scale = scale_C.detach().float()
    product.weight.detach().copy_(product.weight.float() * scale[:, None])
    product.bias.detach().copy_(product.bias.float() * scale)
    scale_C.detach().fill_(1.0)


def _attend_to_frame(attention: Any, joined: nn.Linear, hidden_states: Tensor) -> tuple[Tensor, None]:
    """Replace InternVLVisionAttention.forward for a layer without norms of queries and keys: [F,S,C], and None.

    ``joined`` has the projections of queries, keys and values.
    """
    frames, rows, width = hidden_states.shape
    qkv = joined(hidden_states).view(frames, rows, 3, attention.num_heads, -1)
    attended = _attend_batch(*qkv.unbind(2))
    return attention.projection_layer(attended.reshape(frames, rows, width)), None


def _run_qwen_block(
    block: Any,
    steps: FusedSteps,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **options: Any,
) -> Tensor:
    """Replace the forward of a Qwen vision block, with the residual additions fused into the norms."""
    _, normed = steps.norm(block.norm1, hidden_states)
    attended = block.attn(normed, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **options)
    hidden_states, normed = steps.norm(block.norm2, hidden_states, attended)
    output: Tensor = hidden_states + block.mlp(normed)
    return output


def _run_tanh_mlp(steps: FusedSteps, first: nn.Linear, second: nn.Linear, hidden_states: Tensor) -> Tensor:
    """Replace the forward of an MLP with tanh GELU between its two layers."""
    output: Tensor = second(steps.apply_gelu_linear(first, hidden_states))
    return output


def _run_gated_mlp(steps: FusedSteps, joined: nn.Linear, down: nn.Linear, hidden_state: Tensor) -> Tensor:
    """Replace the forward of a gated MLP whose gate and up projections are one layer."""
    output: Tensor = down(steps.gate(joined(hidden_state)))
    return output


def _join_gate_and_up(mlp: Any) -> nn.Linear:
    """Join the gate and up projections of an MLP into one layer, of which they become views.

    An inner width that is not a multiple of 8 is zero-padded in place to a multiple of 128, also in ``down_proj``.
    """
    missing = -mlp.gate_proj.out_features % _INNER_MULTIPLE if mlp.gate_proj.out_features % _ALIGNED else 0
    joined = _join_layers((mlp.gate_proj, mlp.up_proj), missing)
    mlp.down_proj.in_features = mlp.gate_proj.out_features
    mlp.down_proj.weight = nn.Parameter(pad(mlp.down_proj.weight.detach(), (0, missing)), requires_grad=False)
    return joined


def _join_layers(layers: Sequence[nn.Linear], missing: int = 0) -> nn.Linear:
    """Join linear layers of equal size into one layer; the given layers become views of its weights.

    ``missing`` is the number of zero outputs to add to each layer.
    """
    outputs = layers[0].out_features + missing
    weight = torch.cat([pad(layer.weight.detach(), (0, 0, 0, missing)) for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([pad(layer.bias.detach(), (0, missing)) for layer in layers])
    joined = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    for rank, layer in enumerate(layers):
        rows = slice(rank * outputs, (rank + 1) * outputs)
        layer.out_features = outputs
        layer.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[rows], requires_grad=False)
    return joined


def _attend_in_pieces(
    attention: Any,
    steps: FusedSteps,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    max_seqlen: int | None = None,
    **options: Any,
) -> Tensor:
    """Replace the forward of a Qwen tower's attention, in which each piece (run of consecutive rows) attends to itself.

    Args:
        cu_seqlens: [pieces + 1], the bounds of the pieces.
        max_seqlen: the rows of the longest piece; None computes it, which makes the CPU wait for the GPU.
    """
    n_rows = len(hidden_states)
    qkv_S3HE = attention.qkv(hidden_states).view(n_rows, 3, attention.num_heads, -1)
    query, key, value = steps.rotate(qkv_S3HE, *position_embeddings)
    longest = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
    implementation = attention.config._attn_implementation
    if implementation == "sdpa":
        attended = attend_in_pieces(query, key, value, cu_seqlens, longest)
    else:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        lengths: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seqlens)
        lengths |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
        attended, _ = ALL_ATTENTION_FUNCTIONS[implementation](
            attention, query, key, value, attention_mask=None, scaling=attention.scaling, is_causal=False, **lengths
        )
    projected: Tensor = attention.proj(attended.reshape(n_rows, -1))
    return projected


def attend_in_pieces(query_SHE: Tensor, key_SHE: Tensor, value_SHE: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Attend within each piece of rows, [S,H,E], in as few calls as the device allows; return [S,H,E].

    Pieces of equal length are one batch of sdpa. Otherwise there is a single call of torch's variable-length attention
    if the GPU supports it, or one call of sdpa per distinct length.

    Args:
        cu_seqlens: [pieces + 1], the bounds of the pieces.
        longest: the number of rows in the longest piece.
    """
    parts = (query_SHE, key_SHE, value_SHE)
    n_pieces = len(cu_seqlens) - 1
    if n_pieces * longest == len(query_SHE):
        return _attend_batch(*(part.view(n_pieces, longest, *part.shape[1:]) for part in parts)).flatten(0, 1)
    if (varlen := _find_varlen_attention(query_SHE)) is not None:
        bounds = cu_seqlens.to(torch.int32)
        attended: Tensor = varlen(*parts, bounds, bounds, longest, longest)
        return attended
    out_SHE = torch.empty_like(value_SHE)
    lengths = cu_seqlens.diff()
    for length in set(lengths.tolist()):
        starts = cu_seqlens[:-1][lengths == length]
        rows = starts[:, None] + torch.arange(length, device=starts.device)
        out_SHE[rows] = _attend_batch(*(part[rows] for part in parts))
    return out_SHE


def _attend_batch(query_PLHE: Tensor, key_PLHE: Tensor, value_PLHE: Tensor) -> Tensor:
    """Attend within each of P pieces of L rows: [P,L,H,E] in and out."""
    query, key, value = (part.transpose(1, 2) for part in (query_PLHE, key_PLHE, value_PLHE))
    return scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _find_varlen_attention(query_SHE: Tensor) -> Callable[..., Any] | None:
    """Return torch's variable-length attention; None if torch is older than 2.9 or does not support this tensor.

    It supports bfloat16 and float16 on GPUs of compute capability 8 or later.
    """
    if not query_SHE.is_cuda or query_SHE.dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(query_SHE.device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - torch before 2.9 has none
    except ImportError:
        return None
    function: Callable[..., Any] = varlen_attn
    return function


def _pool_frames(model: Any, image_features: Tensor) -> Tensor:
    """Replace LlavaOnevisionModel.apply_pooling for [F,S,C], with the channels last, which a GPU reads contiguously."""
    vision = model.config.vision_config
    side = vision.image_size // vision.patch_size
    frames_FCHW = image_features.reshape(len(image_features), side, side, -1).permute(0, 3, 1, 2)
    half = math.ceil(side / 2)
    pooled = interpolate(frames_FCHW, size=(half, half), mode="bilinear")
    return pooled.permute(0, 2, 3, 1).reshape(len(pooled), half * half, -1)
