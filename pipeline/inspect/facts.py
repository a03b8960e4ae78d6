"""Names and values side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Render (name, value) a line. Values come from files, so they are never read as markup."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def flat(values: Mapping[str, object]) -> str:
    """Join the values that are set as ``name=value``."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None)
