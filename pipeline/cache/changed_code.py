"""Handle a cache, or answers, whose user method now has other code than the code that made them.

Changed code is refused like a changed parameter. ``--on-changed redo`` restarts a cache instead: one write gives its
header the identity of the current code, after which no row of the old code counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gstep.lazy import load_object
from pipeline.cache.header import (
    HEADER,
    CacheHeader,
    CacheIdentity,
    compute_fingerprint,
    list_differences,
    serialize_header,
)
from pipeline.cache.live import Ledger, LiveVideos, select_ok
from pipeline.cache.table import parse_file_name, read_file
from pipeline.cache.token_shard import is_shard_name
from pipeline.cache.writer import commit_records
from pipeline.errors import IdentityMismatch, UsageError, make_printable
from pipeline.own_code import find_class_file, hash_code, is_comparable
from pipeline.storage.stores import Store

REDO = "redo"  # the value of --on-changed


def find_changed_methods(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    refusal: str,
    has: str = "the cache has",
    *,
    redo: bool = False,
) -> list[str]:
    """Return the import paths of the user methods whose code differs between two identities.

    Code that is unknown in ``old``, as in caches of older versions, counts as unchanged; with ``redo`` it counts as
    changed. A difference in code alone raises nothing: call ``refuse_changed_code`` with the result.

    Args:
        refusal: the first line of the error.
        has: the words before each old value in the error.

    Raises:
        IdentityMismatch: the identities differ in anything but code. The parameters, seed and declarations of a method
            with changed code are not compared.
    """
    changed_methods = list[str]()

    def take_old_code(old_method: Mapping[str, Any], method: Mapping[str, Any]) -> Mapping[str, Any]:
        if old_method.get("code") == method["code"]:
            return method
        changed_methods.append(method["method"])
        return old_method

    comparable = new if redo else keep_unknown_code(old, new)
    if differences := list_differences(old, _replace_methods(old, comparable, take_old_code), old_subject=has):
        lines = "\n  ".join(differences)
        raise IdentityMismatch(f"{refusal}:\n  {lines}\nUse those settings, or another --out.")
    return changed_methods


def _replace_methods(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    replace: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a copy of ``new`` with ``replace(old entry, new entry)`` for each user method that both identities have.

    An entry is a user method if it has a hash of its code. Nested mappings are searched too.
    """
    replaced = dict(new)
    for key, value in new.items():
        old_value = old.get(key)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping):
            is_method = "code" in value and old_value.get("method") == value["method"]
            replaced[key] = replace(old_value, value) if is_method else _replace_methods(old_value, value, replace)
    return replaced


def keep_unknown_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``new`` in which code that ``old`` does not record is not a difference.

    Identities of older versions have no hash of a method's code, or a hash that covers other statements. For these
    methods the result has the "code" of ``old``, or none.
    """

    def keep_code(old_method: Mapping[str, Any], method: Mapping[str, Any]) -> Mapping[str, Any]:
        if is_comparable(old_method.get("code")):
            return method
        other_entries = {name: part for name, part in method.items() if name != "code"}
        return other_entries | {name: old_method[name] for name in ("code",) if name in old_method}

    return _replace_methods(old, new, keep_code)


def refuse_changed_code(place: object, methods: Iterable[str], result_name: str) -> None:
    """Raise IdentityMismatch that lists the user methods whose code has changed, unless there are none.

    The message names the file of each method; for that its module is imported, ignoring errors.

    Args:
        place: the cache or the answers.
        methods: import paths; repeats are listed once.
        result_name: "tokens" or "answers".
    """
    lines = [make_printable(f"{name}{_describe_method_file(name)}") for name in dict.fromkeys(methods)]
    if lines:
        raise IdentityMismatch(
            f"{place} has {result_name} of other code, which cannot be mixed with new ones. Changed since:\n  "
            + "\n  ".join(lines)
            + "\nMake them again with --on-changed redo, or name another --out."
        )


def _describe_method_file(name: str) -> str:
    """Import a user class by its path, and return " in FILE"; return "" if the import fails with any Exception."""
    try:
        return f" in {find_class_file(load_object(name))}"
    except Exception:  # noqa: BLE001 - the import runs the user's code
        return ""


def check_class_code(kind: type, code: str | None) -> None:
    """Check that a user class on this node still has the code with which the run began.

    Args:
        code: the hash of the code at the beginning; None skips the check.

    Raises:
        UsageError: the code differs or cannot be hashed.
    """
    if code is not None and (current_code := hash_code(kind)) != code:
        raise UsageError(
            f"{kind.__module__}:{kind.__qualname__} has other code in {find_class_file(kind)} than at the start of the "
            f"run ({current_code}, not {code}): put the same file on all nodes, do not change it during a run, and "
            "rerun"
        )


def check_cache_code(store: Store, old: CacheIdentity, new: CacheIdentity, refusal: str, *, redo: bool) -> bool:
    """Return True if the code of a cache's user method has changed and the cache may continue with the new code.

    It may if ``redo`` is set, or if no video of the cache has tokens. False means that the code is the same, or that
    the cache does not record it and ``redo`` is not set.

    Args:
        refusal: the first line of the error about other differences.

    Raises:
        IdentityMismatch: the code has changed and may not be accepted, or another setting differs.
    """
    changed_methods = find_changed_methods(old, new, refusal, redo=redo)
    if changed_methods and not redo:
        _, rows = LiveVideos.read(store, compute_fingerprint(old), ("status",))
        if len(select_ok(rows)):
            refuse_changed_code(store, changed_methods, "tokens")
    return bool(changed_methods)


def restart_cache(store: Store, header: CacheHeader, identity: CacheIdentity, run_id: str) -> CacheHeader:
    """Give a cache the identity of the changed code, so that a run encodes all its videos again; return the new header.

    The rows of removed videos are committed again under the new identity, so that these videos stay removed. The new
    header is written last, and lists the old fingerprint as superseded. No file is deleted. The caller must hold the
    cache's claim.

    Raises:
        UsageError: the table has rows of an old version, which do not name their identity.
    """
    if len(Ledger(store, "").refresh()):
        raise UsageError(f"{store}: rows of an older version do not record the code that made them: use another --out")
    old, new = compute_fingerprint(header["identity"]), compute_fingerprint(identity)
    if removed_rows := LiveVideos.read_removed(
        store, old
    ):  # committed before the header: rows of this identity do not count yet
        commit_records(store, run_id, 0, removed_rows, made_with=new)
    new_header: CacheHeader = {**header, "identity": identity}
    new_header["superseded"] = sorted({*header.get("superseded", ()), old} - {new})
    store.put(HEADER, serialize_header(new_header))
    return new_header


def delete_superseded(store: Store, header: CacheHeader) -> list[str]:
    """Delete the table files of the superseded identities in ``header`` and the token shards that they name.

    The header stays as it is. Table files are deleted first, so that no row names a missing shard.

    Returns:
        The deleted names; [] if nothing is superseded.
    """
    fingerprints = header.get("superseded", [])
    ledger = Ledger(store, compute_fingerprint(header["identity"])).refresh() if fingerprints else None
    tables = [name for name, made_with in ledger.foreign.items() if made_with in fingerprints] if ledger else []
    shards = set[str]()
    for name in tables:
        rows = read_file(store, parse_file_name(name), ("token_shard",))
        shards |= set(filter(is_shard_name, rows["token_shard"].to_pylist()))
    names = [*tables, *sorted(shards)]  # a token shard is deleted after the rows that name it
    for name in names:
        store.delete(name)
    return names
