"""What becomes of a cache, or of answers, where a user's own method has other code now than the code that made them.

Other code is refused, as another parameter is. ``--on-changed redo`` restarts a cache instead: its header gets the
identity of the code that is there now, in one put. No row of the old code counts after that, since every file of the
table says the identity of its rows (``pipeline.cache.table``), and a run encodes all videos again. So a kill leaves the
cache of either code, never a mixture. The files of the old code are deleted when such a run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gstep.lazy import load_object
from pipeline.cache.header import HEADER, CacheHeader, CacheIdentity, fingerprint, list_differences, serialise_header
from pipeline.cache.live import Ledger, LiveVideos, select_ok
from pipeline.cache.table import parse_file_name, read_file
from pipeline.cache.token_shard import is_shard_name
from pipeline.cache.writer import commit_records
from pipeline.errors import IdentityMismatch, UsageError, printable
from pipeline.own_code import file_of, hash_code, is_comparable
from pipeline.storage.stores import Store

REDO = "redo"  # the value of --on-changed


def match_identity(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    refusal: str,
    has: str = "the cache has",
    *,
    redo: bool = False,
) -> list[str]:
    """Return the own methods whose code is another in the ``new`` identity than in the ``old`` one.

    Code that the old identity does not tell (``keep_unknown_code``) counts as the same code, with ``redo`` as other
    code. Nothing is refused for code: the caller does that with ``refuse_changed_code``.

    Args:
        refusal: the beginning of the error, which says what was made with other settings.
        has: stands before the old value in the error.

    Raises IdentityMismatch for any other difference. Other parameters of a method with changed code are not compared.
    """
    changed_methods = list[str]()

    def take_old_code(old_method: Mapping[str, Any], method: Mapping[str, Any]) -> Mapping[str, Any]:
        if old_method.get("code") == method["code"]:
            return method
        changed_methods.append(method["method"])
        return old_method

    comparable = new if redo else keep_unknown_code(old, new)
    if wrong := list_differences(old, _replace_methods(old, comparable, take_old_code), old_subject=has):
        lines = "\n  ".join(wrong)
        raise IdentityMismatch(f"{refusal}:\n  {lines}\nUse those settings, or another --out.")
    return changed_methods


def _replace_methods(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    replace: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return ``new`` with each own method that both identities have as ``replace(old entry, new entry)`` returns it."""
    replaced = dict(new)
    for key, value in new.items():
        old_value = old.get(key)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping):
            is_method = "code" in value and old_value.get("method") == value["method"]
            replaced[key] = replace(old_value, value) if is_method else _replace_methods(old_value, value, replace)
    return replaced


def keep_unknown_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``new`` with the entry "code" of ``old`` for methods of which ``old`` does not tell the code.

    That is an identity of an older version: it has no hash of the code, or one that covers other statements.
    """

    def keep_code(old_method: Mapping[str, Any], method: Mapping[str, Any]) -> Mapping[str, Any]:
        if is_comparable(old_method.get("code")):
            return method
        without = {name: part for name, part in method.items() if name != "code"}
        return without | {name: old_method[name] for name in ("code",) if name in old_method}

    return _replace_methods(old, new, keep_code)


def refuse_changed_code(place: object, methods: Iterable[str], result_name: str) -> None:
    """Raise IdentityMismatch that names these methods, whose code has changed; return if there are none.

    Args:
        place: the cache or the answers.
        result_name: the results of the old code: "tokens" or "answers".
    """
    lines = [printable(f"{name}{_where(name)}") for name in dict.fromkeys(methods)]
    if lines:
        raise IdentityMismatch(
            f"{place} has {result_name} by other code, and one output has one kind. Changed since:\n  "
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
            f"not {code}): put the same file on all nodes, do not change it during a run, and start again"
        )


def match_cache_code(store: Store, old: CacheIdentity, new: CacheIdentity, refusal: str, *, redo: bool) -> bool:
    """Return True if other code of the method made a cache, whose identity is ``old``, than the code of ``new``.

    Other code is accepted with ``redo``, and for a cache without tokens. ``refusal`` is the beginning of the error that
    another difference raises.

    Raises IdentityMismatch for other code that is not accepted, and for any other difference; CorruptShard, OSError.
    """
    changed_methods = match_identity(old, new, refusal, redo=redo)
    if changed_methods and not redo:
        _, rows = LiveVideos.read(store, fingerprint(old), ("status",))
        if len(select_ok(rows)):
            refuse_changed_code(store, changed_methods, "tokens")
    return bool(changed_methods)


def restart_cache(store: Store, header: CacheHeader, identity: CacheIdentity, run_id: str) -> CacheHeader:
    """Give a cache with this ``header`` another identity, whose code makes its videos again; return the new header.

    Videos that were removed for good stay removed. No file is deleted: ``delete_superseded`` does that later. The
    caller holds the cache's claim. Raises UsageError where files of the table do not say the identity of their rows,
    CorruptShard and OSError.
    """
    if len(Ledger(store, "").refresh()):
        raise UsageError(f"{store}: rows of an older version do not say what code made them: name another --out")
    old, new = fingerprint(header["identity"]), fingerprint(identity)
    if removed_rows := LiveVideos.read_removed(store, old):  # before the header: no row of this identity counts yet
        commit_records(store, run_id, 0, removed_rows, made_with=new)
    begun: CacheHeader = {**header, "identity": identity}
    begun["superseded"] = sorted({*header.get("superseded", ()), old} - {new})
    store.put(HEADER, serialise_header(begun))
    return begun


def delete_superseded(store: Store, header: CacheHeader) -> list[str]:
    """Delete the table files and token shards of the superseded identities in ``header``; return their names.

    The header itself stays as it is. Raises CorruptShard, OSError.
    """
    fingerprints = header.get("superseded", [])
    ledger = Ledger(store, fingerprint(header["identity"])).refresh() if fingerprints else None
    tables = [name for name, made_with in ledger.foreign.items() if made_with in fingerprints] if ledger else []
    shards = set[str]()
    for name in tables:
        rows = read_file(store, parse_file_name(name), ("token_shard",))
        shards |= set(filter(is_shard_name, rows["token_shard"].to_pylist()))
    names = [*tables, *sorted(shards)]  # a token shard goes after the rows that name it
    for name in names:
        store.delete(name)
    return names
