"""Made-up evidence of tokens, and caches that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gstep import VisualTokens
from gstep.backbones import ModelSource
from pipeline.cache.writer import VideoItem
from pipeline.prune.encode_stage import collect_kept_tokens, make_pruning_columns
from pipeline.storage.stores import Store
from tests.gstep import synthetic
from tests.pipeline.asking import tiny_cache
from tests.pipeline.caches import make_identity, random_tokens, source_record, write_header, write_shard

WIDTH = 6  # of an image_embedding, unlike that of a token


def random_evidence(shape: tuple[int, int, int], width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Draw [T,N,width] and [T,N] float32, as an encoder gives them."""
    rng = torch.Generator().manual_seed(1)
    return {
        "image_embedding": torch.randn(*shape[:2], width, generator=rng),
        "token_attention": torch.rand(shape[:2], generator=rng),
    }


def encoded_with(
    video_id: str, tokens: torch.Tensor, ratio: float, method: str, evidence: Mapping[str, torch.Tensor]
) -> VideoItem:
    """Return a video as the encode stage gives it."""
    pruned = synthetic.prune(tokens, ratio, method)
    visual = VisualTokens(tokens, dict(evidence))
    record = source_record(video_id, tuple(tokens.shape))
    return VideoItem({**record, **make_pruning_columns(pruned, visual)}, collect_kept_tokens(pruned, visual, evidence))


def evidence_cache(
    out: Path | Store, videos: Mapping[str, torch.Tensor], ratio: float = 0.25, method: str = "gstep"
) -> Store:
    """Write a cache of ``videos`` with random evidence of each."""
    rows = [encoded_with(name, v, ratio, method, random_evidence(tuple(v.shape))) for name, v in videos.items()]
    evidence = {"image_embedding": "single_patches", "token_attention": "last_layer"}
    store = write_header(out, identity=make_identity(ratio, method, evidence=evidence))
    write_shard(store, "run", *rows)
    return store


def tiny_cache_with_embeddings(out: Path, shape: tuple[int, int, int] = (4, 49, 64), head: str | None = None) -> Store:
    """Write a cache of all tokens of the video "a", made, it says, with the tiny model and the tiny SigLIP's head."""
    source = ModelSource.resolve("tiny")
    model = {"type": source.model_type, "weights": source.identity, "pooling_head": head}
    identity = make_identity(1.0, "none", model=model, evidence={"image_embedding": "single_patches"})
    store = tiny_cache(out, (), ratio=1.0, method="none", failed=("bad",), identity=identity)
    evidence = {"image_embedding": random_evidence(shape, 64)["image_embedding"]}
    write_shard(store, "run", encoded_with("a", random_tokens(0, shape), 1.0, "none", evidence))
    return store
