"""The header of a place on disk: what all its rows were made with, under a schema version."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NotRequired, TypedDict, cast

from pipeline.cache.schema import digest
from pipeline.errors import UsageError
from pipeline.rows import Json, JsonObject
from pipeline.storage.stores import Store

CHECKSUM = "checksum"


class ModelIdentity(TypedDict):
    """The identity of a model: ``type`` is its family; ``weights`` and ``pooling_head`` identify its files."""

    type: str
    weights: str
    pooling_head: NotRequired[str]


class PrunerIdentity(TypedDict):
    """The identity of a pruning: the method, its own hyper-parameters, and the seed of one that draws.

    Of a method from outside gstep also what it declares (``pipeline.cache.method``).
    """

    method: str
    params: dict[str, Json]
    seed: NotRequired[int]
    declares: NotRequired[dict[str, bool]]


#: How frames were sampled: num_frames, or fps and max_frames; rule and snap_to_keyframes_s where they are set.
SamplingIdentity = dict[str, int | float | str | None]


class CacheIdentity(TypedDict):
    """The settings that every row of a cache was made with; a run with others is refused.

    Attributes:
        preprocessing: the family's own settings.
        dtype: of the arithmetic ("compute"), the codec of the stored tokens ("stored", pipeline.cache.codecs), and the
            dtype of evidence as methods see it ("evidence"), where there is any.
        evidence: stored besides the tokens, label -> where in the encoder it is from (gstep.evidence).
    """

    model: ModelIdentity
    preprocessing: dict[str, Json]
    sampling: SamplingIdentity
    pruner: PrunerIdentity
    retention_ratio: float
    dtype: dict[str, str]
    evidence: NotRequired[dict[str, str]]


class CacheHeader(TypedDict):
    """The content of cache.json.

    Attributes:
        newline: base64 of [D] bfloat16, LLaVA-OneVision's row after all tokens of a video; None elsewhere.
        hidden_size: D.
        deepstack_levels: absent from caches made before there were any.
    """

    schema_version: int | str
    identity: CacheIdentity
    newline: str | None
    hidden_size: NotRequired[int]
    deepstack_levels: NotRequired[int]


def deepstack_levels(header: CacheHeader) -> int:
    """Return how many vectors of the token's width are stored with every token, for the first layers of Qwen3-VL."""
    return int(header.get("deepstack_levels", 0))  # headers written before there were levels lack the key


def fingerprint(content: CacheIdentity | JsonObject) -> str:
    """Return ``blake2b:<hex>`` of JSON-able ``content``, however it is laid out as text."""
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def header_bytes(header: CacheHeader | JsonObject) -> bytes:
    """Serialise the header with the checksum of everything else in it, so that no flipped bit goes unseen."""
    content = _without_checksum(header)
    return json.dumps({**content, CHECKSUM: fingerprint(content)}, indent=2).encode()


def read_header_file(
    store: Store, name: str, versions: Collection[int | str], error: type[UsageError], absent: str, of: str = ""
) -> dict[str, Json]:
    """Read the header file ``name`` of a place: an object with schema_version, identity and more.

    A header without a checksum, as they were once written, is taken as it is. Raises ``error`` where the file is
    missing, damaged or of another version.

    Args:
        versions: that are understood, ascending.
        absent: what is said of a place without the file, with the remedy.
        of: what the version is of, in words.
    """
    try:
        header = json.loads(store.read(name))
    except (FileNotFoundError, NotADirectoryError):  # the place is a file, or nothing
        raise error(f"{store}: {absent}") from None
    except (ValueError, RecursionError) as damage:  # bytes that are not UTF-8 raise ValueError too
        raise error(f"{store}/{name}: not JSON: {damage}") from damage
    header = header if isinstance(header, dict) else {}
    if CHECKSUM in header and fingerprint(_without_checksum(header)) != header[CHECKSUM]:
        raise error(f"{store}/{name}: its content does not have the checksum in it; restore the file")
    found = header.get("schema_version")
    if found not in versions:
        known = " and ".join(map(str, versions))
        raise error(f"{store}: {of}schema version {found!r}; this program reads version {known}")
    if not isinstance(header.get("identity"), dict):
        raise error(f"{store}/{name}: it holds no identity; restore the file")
    return header


def differences(
    old: Mapping[str, object],
    new: Mapping[str, object],
    prefix: str = "",
    has: str = "the cache has",
    other: str = "this run",
) -> list[str]:
    """Return a line for each leaf in which two nested mappings differ.

    ``has`` and ``other`` say who has the old and the new value: ``pruner.params.alpha: the cache has 0.5, this run
    0.3``.
    """
    lines: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.", has, other)
        elif a != b:
            lines.append(f"{prefix}{key}: {has} {a!r}, {other} {b!r}")
    return lines


def _without_checksum(header: CacheHeader | JsonObject) -> JsonObject:
    """Return a header without its own checksum."""
    return {key: cast(Json, value) for key, value in header.items() if key != CHECKSUM}
