"""What becomes of a cache, or of answers, where a user's own method has other code now than the code that made them.

Other code is refused as another parameter is. ``--on-changed redo`` begins a cache anew instead: its header gets the
identity of the code that is there now, in one put. From then on no row of the old code counts, since every file of the
table says the identity of its rows (``pipeline.cache.table``), and a run encodes all videos again. So a kill leaves the
cache of either code, never a mixture. The files of the old code are deleted when such a run ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow.compute as pc

from gstep.lazy import load_object
from pipeline.cache.header import HEADER, CacheHeader, CacheIdentity, differences, fingerprint, header_bytes
from pipeline.cache.live import Ledger, LiveVideos
from pipeline.cache.table import file_named, read_file
from pipeline.cache.writer import commit
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.own_code import file_of, hash_code
from pipeline.storage.stores import Store

REDO = "redo"  # the value of --on-changed


def match_identity(
    stored: Mapping[str, Any],
    wanted: Mapping[str, Any],
    refusal: str,
    has: str = "the cache has",
    *,
    redo: bool = False,
) -> list[str]:
    """Return the own methods whose code is another in the ``wanted`` identity than in the ``stored`` one.

    Where an identity that was made before there were hashes of code says nothing of it, the code counts as the same;
    with ``redo`` it counts as another.

    Args:
        refusal: the beginning of the error, which says what was made with other settings.

    Raises IdentityMismatch for any difference beside code, and without ``redo`` for code.
    """
    changed = list[str]()
    known = wanted if redo else without_unknown_code(stored, wanted)
    wrong = differences(stored, _with_stored_code(stored, known, changed), has=has)
    if wrong:
        lines = "\n  ".join(wrong)
        raise IdentityMismatch(f"{refusal}:\n  {lines}\nUse those settings, or another --out.")
    return changed


def _with_stored_code(stored: Mapping[str, Any], wanted: Mapping[str, Any], changed: list[str]) -> dict[str, Any]:
    """Return ``wanted`` with what ``stored`` says of methods whose code is another; these are added to ``changed``."""
    matched = dict(wanted)
    for key, value in wanted.items():
        there = stored.get(key)
        if not (isinstance(there, Mapping) and isinstance(value, Mapping)):
            continue
        if "code" not in value or there.get("method") != value["method"]:
            matched[key] = _with_stored_code(there, value, changed)
        elif there.get("code") != value["code"]:
            changed.append(value["method"])
            matched[key] = there
    return matched


def without_unknown_code(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``wanted`` without the code of methods of which ``stored``, made before there were hashes, names none."""
    return {
        key: value if not isinstance(value, Mapping) else _known_part(stored.get(key), value)
        for key, value in wanted.items()
    }


def _known_part(there: object, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of an identity as ``without_unknown_code``."""
    if not isinstance(there, Mapping):
        return value
    if "code" in value and "code" not in there and there.get("method") == value["method"]:
        return {name: part for name, part in value.items() if name != "code"}
    return without_unknown_code(there, value)


def refuse_changed_code(place: object, methods: Iterable[str], what: str) -> None:
    """Raise IdentityMismatch where the code of any of these methods is another now; ``what`` was made with it."""
    lines = [f"{name}{_where(name)}" for name in dict.fromkeys(methods)]
    if lines:
        raise IdentityMismatch(
            f"{place} holds {what} that other code made, and one place holds one kind. Changed since:\n  "
            + "\n  ".join(lines)
            + "\nMake them again with --on-changed redo, or name another --out."
        )


def _where(name: str) -> str:
    """Return " in FILE" of a class by its import path, "" where it cannot be imported here."""
    try:
        return f" in {file_of(load_object(name))}"
    except Exception:  # noqa: BLE001 - importing runs code of the user's
        return ""


def check_code(kind: type, code: str | None) -> None:
    """Raise UsageError where a class on this node has other code than ``code``, which the run began with."""
    if code is not None and (now := hash_code(kind)) != code:
        raise UsageError(
            f"{kind.__module__}:{kind.__qualname__} has other code in {file_of(kind)} than the run began with ({now}, "
            f"not {code}): bring the same file to all nodes, leave it alone while a run goes on, and start again"
        )


def has_tokens(store: Store, identity: CacheIdentity) -> bool:
    """Return whether a cache of this identity has a video with tokens. Raises CorruptShard, OSError."""
    status = LiveVideos.open(store, fingerprint(identity)).live(("status",))["status"]
    return bool(pc.any(pc.equal(status, "ok")).as_py())


def begin_anew(store: Store, header: CacheHeader, identity: CacheIdentity, run_id: str) -> CacheHeader:
    """Give a cache with this ``header`` another identity, whose code makes its videos again; return the new header.

    Videos that were removed for good stay removed. The caller holds the cache's claim. Raises UsageError where files of
    the table do not say the identity of their rows, CorruptShard and OSError.
    """
    if len(Ledger(store, "").refresh()):
        raise UsageError(f"{store}: rows of an older version do not say what code made them: name another --out")
    old, new = fingerprint(header["identity"]), fingerprint(identity)
    live = LiveVideos.open(store, old)
    rows = live.live(("status",))
    removed = list(live.table.read_rows(rows.filter(pc.equal(rows["status"], "removed"))))
    if removed:  # before the header: no row of this identity counts yet
        commit(store, run_id, 0, removed, made_with=new)
    begun: CacheHeader = {**header, "identity": identity}
    begun["superseded"] = sorted({*header.get("superseded", ()), old} - {new})
    store.put(HEADER, header_bytes(begun))
    return begun


def drop_superseded(store: Store, header: CacheHeader) -> list[str]:
    """Delete the rows and tokens that the code before has made; return the names of the files. Raises OSError."""
    superseded = header.get("superseded", [])
    ledger = Ledger(store, fingerprint(header["identity"])).refresh() if superseded else None
    tables = [name for name, made_with in ledger.foreign.items() if made_with in superseded] if ledger else []
    shards = set[str]()
    for name in tables:
        shards |= set(read_file(store, file_named(name), ("token_shard",))["token_shard"].to_pylist()) - {None}
    names = [*tables, *sorted(shards)]  # a token shard goes after the rows that name it
    for name in names:
        store.delete(name)
    return names
