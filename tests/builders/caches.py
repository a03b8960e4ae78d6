"""Small real caches for tests, written through the same stages as a run: pruner -> rows -> sink -> commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from gstep import VisualTokens
from gstep.backbones import ModelSource, family_of
from pipeline.cache.header import HEADER, compute_fingerprint, get_codec, read_header, serialize_header
from pipeline.cache.live import INDEX_COLUMNS, LiveVideos
from pipeline.cache.schema import CODED_VERSIONS, SCHEMA_VERSION
from pipeline.cache.writer import VideoItem, commit_records, write_token_shard
from pipeline.errors import VideoFault
from pipeline.prune.decode_stage import VideoDecoder, make_decoding_columns
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder, collect_kept_tokens, make_pruning_columns
from pipeline.rows import VideoRecord, make_failed_video, make_todo_row
from pipeline.storage.stores import LocalStore, Store
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.gstep import synthetic

if TYPE_CHECKING:
    from pipeline.prune.request import Request


def random_tokens(seed: int, shape: tuple[int, int, int] = (4, 25, 16)) -> torch.Tensor:
    """Draw [T,N,D] bfloat16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def source_record(video_id: str, shape: tuple[int, int, int], **more: Any) -> VideoRecord:
    """Return what the decode stage knows of a video."""
    n_frames, per_frame, _ = shape
    return {
        "video_id": video_id,
        "uri": f"/videos/{video_id}",
        "status": "ok",
        "attempts": 1,
        "n_frames": n_frames,
        "tokens_per_frame": per_frame,
        "frame_indices": list(range(n_frames)),
        "timestamps": [t / 4 for t in range(n_frames)],
        "fps": 4.0,
        "clip_frames": n_frames,
        **more,
    }


def encoded(
    video_id: str, tokens: torch.Tensor, ratio: float, method: str, deepstack: Sequence[torch.Tensor] = (), **more: Any
) -> VideoItem:
    """Return a video as the encode stage gives it."""
    pruned = synthetic.prune(tokens, ratio, method)
    visual = VisualTokens(tokens, deepstack=tuple(deepstack))
    record: VideoRecord = source_record(video_id, tuple(tokens.shape), **more)
    return VideoItem({**record, **make_pruning_columns(pruned, visual)}, collect_kept_tokens(pruned, visual))


def encoded_failure(video_id: str, fault: VideoFault, **more: Any) -> VideoItem:
    return VideoItem(make_failed_video(source_record(video_id, (1, 1, 1), **more), fault))


def make_identity(
    ratio: float = 0.25, method: str = "gstep", codec: str = "bfloat16", source: ModelSource | None = None, **more: Any
) -> dict[str, Any]:
    """Return the identity of a cache, of no model where there is no ``source``."""
    model = ("llava_onevision", "none") if source is None else (source.model_type, source.identity)
    return {
        "model": dict(zip(("type", "weights"), model, strict=True)),
        "pruner": {"method": method, "params": {}},
        "retention_ratio": ratio,
        "dtype": {"stored": codec},
        **more,
    }


def write_header(
    out: Path | Store, ratio: float = 0.25, method: str = "gstep", *, codec: str = "bfloat16", **more: Any
) -> Store:
    store = LocalStore(out) if isinstance(out, Path) else out
    store.make()
    version, identity = CODED_VERSIONS.get(codec, SCHEMA_VERSION), make_identity(ratio, method, codec, sampling={})
    store.put(HEADER, serialize_header({"schema_version": version, "identity": identity, "newline": None, **more}))
    return store


def decode_row_of(decoder: VideoDecoder, path: Path, video_id: str = "v") -> tuple[VideoRecord, Any]:
    """Decode a video in the decoder's child process, as a run does; returns its record and its frames."""
    row = make_todo_row(video_id, str(path))
    with decoder.open_archives([row]) as archives, decoder.open(row, archives) as source:
        return decoder.decode_row(row, source)


def begin_cache(request: Request, *videos: VideoItem) -> Store:
    """Begin the cache of a checked request, with a shard of ``videos`` if there are any."""
    header = request.recipe.header("float32", family_of(request.recipe.source).static())
    request.store.make()
    request.store.put(HEADER, serialize_header(header))
    if videos:
        write_shard(request.store, "run", *videos)
    return request.store


def write_shard(store: Store, run_id: str, *videos: VideoItem) -> str:
    """Write and commit one shard, as the next of its run; returns the name of its videos shard."""
    identity = read_header(store)["identity"]
    rows = write_token_shard(videos, store=store, run_id=run_id, codec=get_codec(identity))
    before = set(store.names("videos", ".parquet"))
    number = sum(name.startswith(f"videos/{run_id}-") for name in before)
    commit_records(store, run_id, number, rows, made_with=compute_fingerprint(identity))
    (name,) = set(store.names("videos", ".parquet")) - before
    return name


def make_cache(
    out: Path | Store, videos: dict[str, torch.Tensor], ratio: float = 0.25, method: str = "gstep", **more: Any
) -> Store:
    """Write one shard that holds the pruned tokens of ``videos``."""
    store = write_header(out, ratio, method, **more)
    write_shard(store, "run", *(encoded(name, tokens, ratio, method) for name, tokens in videos.items()))
    return store


def limit_merges(patch: pytest.MonkeyPatch, **limits: int) -> None:
    """Let merges write small row groups and files, in small steps: GROUP_ROWS, _PART_GROUPS, _MAX_FILES_PER_STEP."""
    for name, limit in limits.items():
        patch.setattr(f"pipeline.cache.merging.{name}", limit)


def read_live(store: Store, columns: Sequence[str] = INDEX_COLUMNS) -> pa.Table:
    """Read columns of every live row with ``shard`` and ``row``, by video_id."""
    return LiveVideos.open(store).live(columns)


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


def encode_clip(
    source: ModelSource,
    clip: Path,
    n_frames: int,
    method: str,
    ratio: float,
    video_id: str = "v",
    start_s: float | None = None,
    **params: Any,
) -> tuple[NDArray[np.uint8], VideoItem]:
    """Return the frames of a clip and the video as the encoder gives it."""
    decoded = decode_video(DecodeRequest(clip, Sampling(n_frames), family_of(source).preprocessor(), start_s))
    begun: VideoRecord = {"video_id": video_id, "uri": str(clip), "manifest": "{}", "status": "ok", "attempts": 1}
    if start_s is not None:
        begun["start_s"] = start_s
    encoder = VideoEncoder(EncodeSetup(source, method, ratio, pruner_params=params, device="cpu", dtype="float32"))
    return decoded.frames, encoder.encode_video_alone({**begun, **make_decoding_columns(decoded, 1)}, decoded.frames)


def cache_of(
    out: Path, source: ModelSource, *videos: VideoItem, method: str = "none", ratio: float = 1.0, **header: Any
) -> Store:
    """Write a cache of videos, by default of all their tokens, which says that it is of ``source``."""
    identity = make_identity(ratio, method, source=source)
    levels = family_of(source).static().deepstack_levels
    store = write_header(out, identity=identity, deepstack_levels=levels, **header)
    write_shard(store, "run", *videos)
    return store
