"""The header of a place on disk: the settings that all its rows were made with, under a schema version.

Whoever reads a cache imports no code that it names: of a pruning method from outside gstep the header itself says what
the method declares.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

from pipeline.cache.codecs import BFLOAT16, CODECS, TokenCodec
from pipeline.cache.schema import CODED_VERSIONS, SCHEMA_VERSION, VERSIONS, digest
from pipeline.errors import NotACache, UsageError
from pipeline.own_code import hash_code
from pipeline.rows import Json, JsonObject
from pipeline.storage.stores import Store

if TYPE_CHECKING:  # a header is read without torch
    from gstep.pruners.base import Pruner

HEADER = "cache.json"
CHECKSUM = "checksum"


class ModelIdentity(TypedDict):
    """The identity of a model: ``type`` is its family; ``weights`` and ``pooling_head`` identify its files."""

    type: str
    weights: str
    pooling_head: NotRequired[str]


class PrunerIdentity(TypedDict):
    """The identity of a pruning: the method, its own hyper-parameters, and the seed of one that draws.

    Of a method from outside gstep also what it declares (``DeclaredMethod``), and the hash of its code, which caches
    lack that were made before there was one.
    """

    method: str
    params: dict[str, Json]
    seed: NotRequired[int]
    declares: NotRequired[dict[str, bool]]
    code: NotRequired[str]


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
        superseded: fingerprints of the identities that the cache had before the code of its method changed.
    """

    schema_version: int | str
    identity: CacheIdentity
    newline: str | None
    hidden_size: NotRequired[int]
    deepstack_levels: NotRequired[int]
    superseded: NotRequired[list[str]]


def deepstack_levels(header: CacheHeader) -> int:
    """Return how many vectors of the token's width are stored with every token, for the first layers of Qwen3-VL."""
    return int(header.get("deepstack_levels", 0))  # headers written before there were levels lack the key


def codec_of(identity: CacheIdentity, place: object = "the cache") -> TokenCodec:
    """Return the codec of the tokens of a cache with this identity. Raises NotACache for one that is not known here."""
    name = identity.get("dtype", {}).get("stored", BFLOAT16.name)
    if name not in CODECS:
        known = ", ".join(CODECS)
        raise NotACache(
            f"{place}: its tokens are stored by the codec {name!r}; this program knows {known}: read it with the "
            "version that wrote it"
        )
    return CODECS[name]


def read_header(store: Store) -> CacheHeader:
    """Read the cache's header (schema version, identity, newline, shape of a token). Raises NotACache."""
    absent = f"not a pruned-token cache (no {HEADER}); make one with python -m jobs.prune"
    header = cast(CacheHeader, read_header_file(store, HEADER, VERSIONS, NotACache, absent))
    codec_of(header["identity"], store)
    return header


def coded_header(header: CacheHeader, codec: str) -> CacheHeader:
    """Return the header of a cache that holds the same tokens in another codec."""
    identity = {**header["identity"], "dtype": {**header["identity"]["dtype"], "stored": codec}}
    version = CODED_VERSIONS.get(codec, SCHEMA_VERSION)
    return cast(CacheHeader, {**header, "schema_version": version, "identity": identity})


def made_with(store: Store) -> str | None:
    """Return the fingerprint of the cache's identity; None where there is no cache. Raises NotACache."""
    return fingerprint(read_header(store)["identity"]) if store.exists(HEADER) else None


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


@dataclass(frozen=True)
class DeclaredMethod:
    """The properties that a method's class declares of the tokens it keeps; see :class:`gstep.pruners.base.Pruner`."""

    nested: bool
    merges: bool
    exact: bool
    reorders: bool

    @classmethod
    def by(cls, kind: type[Pruner]) -> DeclaredMethod:
        """Return what a method's class declares."""
        return cls(kind.nested, kind.merges, kind.exact, kind.reorders)


def describe_method(pruner: Pruner) -> PrunerIdentity:
    """Describe a method and its parameters, JSON-able, for the identity of a cache or of answers.

    Of a method from outside gstep it says what the method declares and the hash of its code, too.

    Raises ValueError where a parameter has no form in JSON.
    """
    from gstep.pruners import PRUNERS, method_name  # noqa: PLC0415 - torch loads only where methods are looked at

    method, params = method_name(type(pruner)), pruner.params()
    try:
        same = json.loads(json.dumps(params, allow_nan=False)) == params
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(f"method {method!r}: parameters are recorded as JSON, which cannot hold {params}")
    identity: PrunerIdentity = {"method": method, "params": params}
    if method not in PRUNERS:
        identity["declares"] = asdict(DeclaredMethod.by(type(pruner)))
        identity["code"] = hash_code(type(pruner))
    return identity


def declared_method(identity: CacheIdentity) -> DeclaredMethod | None:
    """Return what the method that pruned a cache of this identity declares, or None where that is unknown here."""
    from gstep.pruners import PRUNERS  # noqa: PLC0415 - as above

    described = identity.get("pruner", {})
    if described.get("method") in PRUNERS:
        return DeclaredMethod.by(PRUNERS[described["method"]])
    declares = described.get("declares")
    if not (isinstance(declares, Mapping) and declares.keys() == DeclaredMethod.__dataclass_fields__.keys()):
        return None
    return DeclaredMethod(**declares)
