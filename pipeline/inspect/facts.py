"""Names and values side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from pipeline.cache.header import CacheIdentity
from pipeline.errors import Fault
from pipeline.execution.outcome import Outcome

K = TypeVar("K")


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Render (name, value) a line. Values come from files, so they are never read as markup."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def identity_facts(identity: CacheIdentity) -> list[tuple[str, str]]:
    """Return (name, value) pairs of model, pruner and storage."""
    model, pruner = identity["model"], identity["pruner"]
    return [
        ("model", f"{model['type']}  {model['weights']}"),
        ("pruner", f"{pruner['method']}  {flat(pruner['params'])}"),
        ("stored", f"retention ratio {identity['retention_ratio']}, {identity['dtype']['stored']}"),
    ]


def fault_rows(counts: Outcome, faults: Mapping[K, Fault]) -> list[tuple[str, int, tuple[str, str], str]]:
    """Return (class, count, (id, message) of an example, remedy) of each class of failures, as pages list them."""
    remedies = {str(name): fault.remedy for name, fault in faults.items()}
    return [(name, count, counts.examples[name], remedies.get(name, "")) for name, count in counts.failures.items()]


def flat(values: Mapping[str, object]) -> str:
    """Join the values that are set as ``name=value``."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None)
