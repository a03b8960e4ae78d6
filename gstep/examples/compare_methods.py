"""Prune the same synthetic tokens with several methods, and print how many of GSTEP's tokens each method also keeps.

Run it with ``python gstep/examples/compare_methods.py``.
"""

import torch

import gstep

T, N, D = 16, 196, 64  # frames, tokens per frame, hidden size
generator = torch.Generator().manual_seed(0)
scene = torch.randn(N, D, generator=generator).expand(T, N, D)  # does not change ...
tokens = scene + 0.1 * torch.randn(T, N, D, generator=generator)
for t in range(T):  # ... except for a row of patches that moves on with each frame
    tokens[t, 14 * (t % 14) : 14 * (t % 14 + 1)] += torch.randn(14, D, generator=generator)

reference = gstep.prune(tokens, retention_ratio=0.25)
for method in ("gstep", "novelty", "fps", "vidcom2", "topk", "random", "uniform"):
    pruned = gstep.prune(tokens, retention_ratio=0.25, method=method)
    shared = torch.isin(pruned.index, reference.index).sum().item()
    frames = (pruned.index // N).bincount(minlength=T)
    print(
        f"{method:8} keeps {pruned.n_kept} of {T * N}: {shared:4} of gstep's, {frames.min()} to {frames.max()} a frame"
    )
