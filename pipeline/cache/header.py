"""Read and write the header of a cache or of answers: a schema version, and the settings that all rows share."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NotRequired, TypedDict, cast

from pipeline.cache.codecs import BFLOAT16, CODECS, TokenCodec
from pipeline.cache.schema import CODED_VERSIONS, SCHEMA_VERSION, VERSIONS, hash_bytes
from pipeline.errors import NotACache, UsageError, make_printable
from pipeline.own_code import hash_code
from pipeline.rows import Json, JsonObject
from pipeline.storage.stores import CARD, Store

if TYPE_CHECKING:  # headers are read without torch
    from gstep.backbones import ModelSource
    from gstep.pruners.base import Pruner

HEADER = "cache.json"
CHECKSUM = "checksum"
_MAX_LINE_BYTES = 2**14  # of a line in an error about differences, which may quote a prompt
# drop_tokens deletes the file only if it has exactly this content, so that changes of the user stay.
_CARD_TEXT: Final = """\
---
configs:
- config_name: videos
  data_files: videos/*.parquet
  default: true
- config_name: tokens
  data_files: tokens/*.parquet
---

# Pruned visual tokens

This is a cache of gstep-cache. The table `videos` has a row for each video, and the table `tokens` a row for each
stored token. With PLACE as the folder or the name of this dataset:

```python
from datasets import load_dataset

videos = load_dataset("PLACE", split="train")
tokens = load_dataset("PLACE", "tokens", split="train")
```

**Superseded rows are included.** If `videos` has several rows for a video, its live row is the first by: `status`
removed before ok before failed, most `attempts`, most `rewritten`, smallest `tie_break`. Only the tokens in the file
that the live row names in `token_shard` count. `python -m jobs.compact` and then `python -m jobs.verify --clean` delete
what is superseded.
"""


class ModelIdentity(TypedDict):
    """The identity of a model in a cache's header.

    Attributes:
        type: the model type of transformers.
        weights: identifies the files of the checkpoint.
        family: only for the family ``generic`` and for user families.
        pooling_head: identifies the file of the pooling head, if there is one.
    """

    type: str
    weights: str
    family: NotRequired[str]
    pooling_head: NotRequired[str]


class PrunerIdentity(TypedDict):
    """The identity of a pruning method in a cache's header.

    Attributes:
        method: the name of a built-in method, or the import path of a user method.
        seed: only for methods that draw random numbers.
        declares: the fields of MethodDeclarations; only for user methods.
        code: the hash of a user method's code; old caches lack it.
    """

    method: str
    params: dict[str, Json]
    seed: NotRequired[int]
    declares: NotRequired[dict[str, bool]]
    code: NotRequired[str]


#: The sampling of frames: num_frames, or fps and max_frames; rule and snap_to_keyframes_s if set.
SamplingIdentity = dict[str, int | float | str | None]


class CacheIdentity(TypedDict):
    """The settings that all rows of a cache share; a run with other settings is refused.

    Attributes:
        preprocessing: the settings of the model's family.
        dtype: "compute", the dtype of the arithmetic; "stored", the codec of the tokens; and, if methods use evidence,
            "evidence", the dtype of this evidence.
        evidence: the evidence in the cache, label -> source in the encoder (gstep.evidence).
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
        newline: base64 of [D] bfloat16, the row that LLaVA-OneVision appends to the tokens of a video; None for other
            families.
        deepstack_levels: absent from old caches, which have none.
        superseded: the fingerprints of the identities that the cache had before the code of its method changed.
    """

    schema_version: int | str
    identity: CacheIdentity
    newline: str | None
    hidden_size: NotRequired[int]
    deepstack_levels: NotRequired[int]
    superseded: NotRequired[list[str]]


def identify_model(source: ModelSource) -> ModelIdentity:
    """Build the identity of a model; the caller adds its pooling head."""
    identity: ModelIdentity = {"type": source.model_type, "weights": source.identity}
    if source.family != source.model_type:
        identity["family"] = source.family
    return identity


def get_deepstack_levels(header: CacheHeader) -> int:
    """Return the number of deepstack vectors stored with every token (Qwen3-VL); 0 for other models and old headers."""
    return int(header.get("deepstack_levels", 0))  # headers written before there were levels lack the key


def get_codec(identity: CacheIdentity, place: object = "the cache") -> TokenCodec:
    """Return the codec of the tokens in a cache with this identity; bfloat16 if an old identity names none.

    Raises:
        NotACache: this version does not know the codec; the message begins with ``place``.
    """
    name = identity.get("dtype", {}).get("stored", BFLOAT16.name)
    if name not in CODECS:
        names = ", ".join(CODECS)
        raise NotACache(
            f"{place}: its tokens are stored by the codec {name!r}; this program knows {names}: read it with the "
            "version that wrote it"
        )
    return CODECS[name]


def read_header(store: Store) -> CacheHeader:
    """Read and check the header of a cache.

    Raises:
        NotACache: there is no header, it is damaged, or it has an unknown version or codec.
    """
    absent = f"not a pruned-token cache (no {HEADER}); make one with python -m jobs.prune"
    header = cast(CacheHeader, read_header_file(store, HEADER, VERSIONS, NotACache, absent))
    get_codec(header["identity"], store)
    return header


def write_new_header(store: Store, header: CacheHeader) -> None:
    """Write the header of a new cache, and a README.md for Hugging Face datasets unless the store has one."""
    store.put(HEADER, serialize_header(header))
    if not store.exists(CARD):
        store.put(CARD, _CARD_TEXT.encode())


def has_generated_card(store: Store) -> bool:
    """Return True if the README.md is exactly the one that ``write_new_header`` writes; False if there is none."""
    return store.exists(CARD) and store.read(CARD) == _CARD_TEXT.encode()


def refuse_occupied_location(store: Store) -> None:
    """Raise NotACache if a store has no header but files other than notes of runs, archive indexes and a README.md."""
    if not store.exists(HEADER) and store.has_other_files():
        raise NotACache(f"{store} exists and is no cache (it has no {HEADER}): name an empty place with --out")


def change_codec(header: CacheHeader, codec: str) -> CacheHeader:
    """Return a copy of a header for the same tokens in another codec: the schema version and the identity change."""
    identity = {**header["identity"], "dtype": {**header["identity"]["dtype"], "stored": codec}}
    version = CODED_VERSIONS.get(codec, SCHEMA_VERSION)
    return cast(CacheHeader, {**header, "schema_version": version, "identity": identity})


def read_fingerprint(store: Store) -> str | None:
    """Return the fingerprint of the identity in the cache's header; None if there is no header.

    Raises:
        NotACache: the header is damaged or has an unknown version or codec.
    """
    return compute_fingerprint(read_header(store)["identity"]) if store.exists(HEADER) else None


def compute_fingerprint(content: CacheIdentity | JsonObject) -> str:
    """Hash JSON-serializable ``content`` to ``blake2b:<hex>``, independently of the order of its keys."""
    return hash_bytes(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def serialize_header(header: CacheHeader | JsonObject) -> bytes:
    """Serialize a header to JSON with a checksum of its content, which detects any flipped bit."""
    content = _remove_checksum(header)
    return json.dumps({**content, CHECKSUM: compute_fingerprint(content)}, indent=2).encode()


def read_header_file(
    store: Store, name: str, versions: Collection[int | str], error: type[UsageError], absent: str, of: str = ""
) -> dict[str, Json]:
    """Read and check a header file: a JSON object with at least ``schema_version`` and ``identity``.

    An old header without a checksum is accepted.

    Args:
        versions: the versions that this program reads, ascending.
        absent: the error message if the file is missing, with the remedy.
        of: words before "schema version" in messages, with a space at the end.

    Raises:
        UsageError: (as the class ``error``) the file is missing, is not JSON, fails its checksum, has another version
            or has no identity.
    """
    try:
        header = json.loads(store.read(name))
    except (FileNotFoundError, NotADirectoryError):  # the location is a file, or does not exist
        raise error(f"{store}: {absent}") from None
    except (ValueError, RecursionError) as damage:  # bytes that are not UTF-8 raise ValueError too
        raise error(f"{store}/{name}: not JSON: {damage}") from damage
    header = header if isinstance(header, dict) else {}
    if CHECKSUM in header and compute_fingerprint(_remove_checksum(header)) != header[CHECKSUM]:
        raise error(f"{store}/{name}: its content does not have the checksum in it; restore the file")
    version = header.get("schema_version")
    if version not in versions:
        readable = " and ".join(map(str, versions))
        remedy = ""
        numbers = [str(text).partition("+")[0] for text in (version, *versions)]  # "3+int8": version 3 with a codec
        if numbers[0].isdecimal():
            remedy = ". A newer version of gstep-cache wrote it: upgrade gstep-cache"
            if int(numbers[0]) < min(map(int, numbers[1:])):
                remedy = ". An older version of gstep-cache wrote it: read it with that version"
        raise error(f"{store}: {of}schema version {version!r}; this program reads version {readable}{remedy}")
    if not isinstance(header.get("identity"), dict):
        raise error(f"{store}/{name}: it holds no identity; restore the file")
    return header


def list_differences(
    old: Mapping[str, object],
    new: Mapping[str, object],
    prefix: str = "",
    old_subject: str = "the cache has",
    new_subject: str = "this run",
) -> list[str]:
    """Return a line for each leaf in which two nested mappings differ, sorted by key.

    An example is ``pruner.params.alpha: the cache has 0.5, this run 0.3``. A missing key counts as None. The key
    "preprocessing" is skipped if the model families differ, since it then differs too. Lines of more than 16 KiB are
    cut.

    Args:
        prefix: the path of keys before each line, with a dot at the end.
    """
    lines: list[str] = []
    families = [model.get("family") for side in (old, new) if isinstance(model := side.get("model"), Mapping)]
    for key in sorted({*old, *new} - ({"preprocessing"} if len({*families}) > 1 else set())):
        a, b = old.get(key), new.get(key)
        inner_a, inner_b = ({} if value is None else value for value in (a, b))
        inner_lines: list[str] = []
        if isinstance(inner_a, Mapping) and isinstance(inner_b, Mapping):
            inner_lines = list_differences(inner_a, inner_b, f"{prefix}{key}.", old_subject, new_subject)
            lines += inner_lines
        is_told = inner_lines or (isinstance(a, Mapping) and isinstance(b, Mapping))
        if a != b and not is_told:  # for example a mapping whose values are all None, and no mapping
            lines.append(make_printable(f"{prefix}{key}: {old_subject} {a!r}, {new_subject} {b!r}", _MAX_LINE_BYTES))
    return lines


def _remove_checksum(header: CacheHeader | JsonObject) -> JsonObject:
    """Return a copy of a header without its checksum."""
    return {key: cast(Json, value) for key, value in header.items() if key != CHECKSUM}


@dataclass(frozen=True)
class MethodDeclarations:
    """The properties that a method's class declares for its tokens, explained in :class:`gstep.pruners.base.Pruner`."""

    nested: bool
    merges: bool
    exact: bool
    reorders: bool

    @classmethod
    def by(cls, kind: type[Pruner]) -> MethodDeclarations:
        """Build the declarations from a method's class."""
        return cls(kind.nested, kind.merges, kind.exact, kind.reorders)


def describe_method(pruner: Pruner) -> PrunerIdentity:
    """Describe a method and its parameters for the identity of a cache or of answers; the caller adds the seed.

    For a user method the result also has its declarations and the hash of its code.

    Raises:
        ValueError: a parameter does not survive a round trip through JSON.
        UsageError: the code of a user method cannot be hashed.
    """
    from gstep.pruners import PRUNERS, get_method_name  # noqa: PLC0415 - torch is loaded only where methods are used

    method = get_method_name(type(pruner))
    params = pruner.params()
    try:
        is_recordable = json.loads(json.dumps(params, allow_nan=False)) == params
    except (TypeError, ValueError):
        is_recordable = False
    if not is_recordable:
        raise ValueError(f"method {method!r}: parameters are recorded as JSON, which cannot hold {params}")
    identity: PrunerIdentity = {"method": method, "params": params}
    if method not in PRUNERS:
        identity["declares"] = asdict(MethodDeclarations.by(type(pruner)))
        identity["code"] = hash_code(type(pruner))
    return identity


def get_method_declarations(identity: CacheIdentity) -> MethodDeclarations | None:
    """Return the declarations of the method that made a cache, without importing a user method.

    Returns:
        None if the method is not built in and the identity lacks its declarations, or has other ones than this version.
    """
    from gstep.pruners import PRUNERS  # noqa: PLC0415 - as above

    entry = identity.get("pruner", {})
    if entry.get("method") in PRUNERS:
        return MethodDeclarations.by(PRUNERS[entry["method"]])
    declares = entry.get("declares")
    if not (isinstance(declares, Mapping) and declares.keys() == MethodDeclarations.__dataclass_fields__.keys()):
        return None
    return MethodDeclarations(**declares)
