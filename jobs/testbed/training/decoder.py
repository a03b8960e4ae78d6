"""The language half for training: Qwen2Model's arithmetic and parameter names, many questions on a video at once.

The visual tokens are worked out once; every question sees them and itself only. Equal to the class of transformers
(tests/jobs/testbed/test_training.py), which would work them out once a question.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.testbed.training.space import ID, NORM, TOKENS, WIDTH, word_vectors

LAYERS, HEADS, INNER = 6, 4, 256
HEAD = WIDTH // HEADS
#: So slow that half of a head's dimensions hardly turn within a video, and match by content.
THETA = 1_000_000.0
EPSILON = 1e-6
_FIRST = 1  # the layer from which on states are taught
_LOUD = 4.0  # the key of the start token
_STILL = HEAD // 2 - 1  # the pair of a head's dimensions that hardly turns


class States(NamedTuple):
    """Of the questions' tokens, [B,K,L,WIDTH], and of the visual ones, [B,n,WIDTH]; all after the last norm.

    Attributes:
        last: after all layers.
        late: after all but one.
        middle: after four.
        early: after three.
        first: after two.
        visual: after two.
    """

    last: Tensor
    late: Tensor
    middle: Tensor
    early: Tensor
    first: Tensor
    visual: Tensor


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(), _Mlp()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(WIDTH, eps=EPSILON) for _ in range(2))

    def prepare(self) -> None:
        at, mlp = self.self_attn, self.mlp
        for linear in (at.q_proj, at.k_proj, at.v_proj):
            nn.init.zeros_(linear.bias)
            nn.init.normal_(linear.weight, std=1 / math.sqrt(WIDTH))
        nn.init.normal_(at.o_proj.weight, std=0.3 / math.sqrt(WIDTH))
        basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
        at.q_proj.weight.mul_(0.3).add_(basis)
        at.k_proj.weight.mul_(0.3).add_(basis)
        at.o_proj.weight.add_(0.3 * at.v_proj.weight.T)
        for linear in (mlp.gate_proj, mlp.up_proj):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(WIDTH))
        nn.init.normal_(mlp.down_proj.weight, std=0.2 / math.sqrt(INNER))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], sees: Tensor, n_before: int, *, last: bool) -> Tensor:
        """After the last layer there is nobody to read the visual tokens: the questions alone come back.

        Args:
            x: [B,S,WIDTH] ``n_before`` tokens that every question sees, then the questions.
            turn: of _turns.
            sees: [questions' tokens,S] what each of them attends to.
        """
        at, h = self.self_attn, self.input_layernorm(x)
        weight = torch.cat([at.q_proj.weight, at.k_proj.weight, at.v_proj.weight])
        bias = torch.cat([at.q_proj.bias, at.k_proj.bias, at.v_proj.bias])
        q, k, v = functional.linear(h, weight, bias).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, turn), _rotated(k, turn)
        attend = functional.scaled_dot_product_attention
        seen = attend(q[:, :, n_before:], k, v, attn_mask=sees)
        if last:
            x = x[:, n_before:]
        else:
            before = attend(q[:, :, :n_before], k[:, :, :n_before], v[:, :, :n_before], is_causal=True)
            seen = torch.cat([before, seen], 2)
        x = x + at.o_proj(seen.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        mixed: Tensor = x + self.mlp.down_proj(functional.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))
        return mixed


class Decoder(nn.Module):
    """Begins with heads that attend to what resembles their token, and copy what is there; two of the
    first layer look to the start of the video, the less the further it is away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(len(TOKENS), WIDTH)
        layers = [_Layer() for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        self.lm_head = nn.Linear(WIDTH, len(TOKENS), bias=False)
        self.newline = nn.Parameter(torch.randn(WIDTH) * NORM / math.sqrt(WIDTH))
        with torch.no_grad():
            self.embed_tokens.weight.copy_(word_vectors())
            self.lm_head.weight.copy_(word_vectors())
            for layer in layers:
                layer.prepare()
            _sense_time(layers[0].self_attn, self.embed_tokens.weight[ID["<|im_start|>"]])
        self.embed_tokens.weight.requires_grad_(False)  # the vision half aims at these

    def forward(self, visual: Tensor, places: Tensor, end: Tensor, questions: Tensor) -> States:
        """Read videos and questions about them.

        Args:
            visual: [B,n,WIDTH] kept tokens.
            places: [B,n] their positions, from 0 upwards.
            end: [B] the position of the newline behind them.
            questions: [B,K,L] token ids.
        """
        batch, count, length = questions.shape
        start = self.embed_tokens.weight[ID["<|im_start|>"]]
        before = torch.cat([start.expand(batch, 1, -1), visual, self.newline.expand(batch, 1, -1)], 1)
        n_before = before.shape[1]
        x = torch.cat([before, self.embed_tokens(questions.flatten(1))], 1)
        asked = end[:, None] + 2 + torch.arange(length).repeat(count)
        positions = torch.cat([torch.zeros(batch, 1, dtype=torch.long), places + 1, end[:, None] + 1, asked], 1)
        turn = _turns(positions)
        own = torch.ones(length, length, dtype=torch.bool).tril()
        alone = torch.block_diag(*[own] * count)  # type: ignore[no-untyped-call]
        sees = torch.cat([torch.ones(count * length, n_before, dtype=torch.bool), alone], 1)
        states, seen = [], x
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, sees, n_before, last=i == LAYERS - 1)
            if i == _FIRST:
                seen = self.norm(x[:, 1 : n_before - 1])
            if i >= _FIRST:
                states.append(self.norm(x[:, -count * length :]).view(batch, count, length, WIDTH))
        first, early, middle, late, last = states
        return States(last, late, middle, early, first, seen)


def _sense_time(attention: _Attention, start: Tensor) -> None:
    """Give the start token a key of its own, and every token a query for it: how much of it is found says where one is.

    One head counts tokens, the other goes by positions. Matching would drown it: grounds are all alike.
    """
    unit = start / start.norm()
    for head, strengths in enumerate(({_STILL: 4.5}, {_STILL: 3.5, 7: 3.5})):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight[rows] *= 0.05
        for pair, strength in strengths.items():
            attention.k_proj.weight[head * HEAD + pair] = _LOUD * unit / math.sqrt(WIDTH)
            attention.q_proj.bias[head * HEAD + pair] = strength * math.sqrt(HEAD) / _LOUD


def _turns(positions: Tensor) -> tuple[Tensor, Tensor]:
    """[B,1,S,HEAD] cosines and sines."""
    frequency = 1.0 / THETA ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angle = positions[:, None, :, None].float() * frequency
    return angle.cos().repeat(1, 1, 1, 2), angle.sin().repeat(1, 1, 1, 2)


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-other, one), -1) * turn[1]
