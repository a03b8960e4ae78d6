"""What the options of all commands share: fields that are flags too, and checks that name the flag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

from pipeline.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
ATTN = ("auto", "flash_attention_2", "sdpa", "eager")


def option(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field that is also a flag: ``extra`` may hold metavar, choices, positional, secret."""
    metadata = {"help": help_text, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata, repr=not extra.get("secret"))


def check(ok: bool, name: str, wanted: str, value: object) -> None:
    """Raises UsageError, naming the flag, where not ``ok``."""
    if not ok:
        raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, got {value!r}")


def check_choices(config: Any) -> None:
    """Hold the fields of a dataclass to their ``choices``: a configuration file passes by the flags' own check."""
    for item in fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        check(not choices or value in choices, item.name, f"one of {choices}", value)


def pruner_params(given: Sequence[str]) -> dict[str, str]:
    """``--pruner-param`` by name, as text: what a value means is for the method's own fields to say."""
    params: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise UsageError(f"--pruner-param takes NAME=VALUE, got {item!r}")
        params[name.strip().replace("-", "_")] = value.strip()
    return params


def positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def failure_limit(max_failed: str | None, total: int) -> int:
    """How many of ``total`` may fail before the run counts as failed; ``max_failed`` is a count or a share."""
    if max_failed is None:
        return max(0, total - 1)
    text = max_failed.strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
        elif "." in text:
            share = float(text)
        else:
            count = int(text)
            check(count >= 0, "max_failed", "a count or a share", text)
            return count
    except ValueError as error:
        raise UsageError(f"--max-failed is a count (10) or a share (0.05 or 5%), got {max_failed!r}") from error
    check(0.0 <= share <= 1.0, "max_failed", "a share in [0, 1]", text)
    return math.floor(share * total + 1e-9)


def as_record(config: Any) -> dict[str, Any]:
    """Every option as JSON-able values, for the run's record; of a secret one only that it is set."""
    values = {item.name: (getattr(config, item.name), item.metadata.get("secret")) for item in fields(config)}
    return {name: "(set)" if secret and value is not None else value for name, (value, secret) in values.items()}
