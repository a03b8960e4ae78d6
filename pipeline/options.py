"""Options that several commands share, as dataclass fields that are also flags, and the checks of their values."""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.errors import UsageError
from pipeline.rows import Json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)

# Failures from outside the items are tolerated up to this count, or this share of all items if that is more.
OUTSIDE_COUNT, OUTSIDE_SHARE = 10, 0.05
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
ENGINES = ("transformers", "vllm")
_SECRET_ENDINGS = ("_token", "api_key", "password", "secret")  # of names of engine arguments
REQUIRED: Any = MISSING  # the default of an option that must be given
ATTN = ("auto", "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", "eager")


def option(default: Any, help_text: str, **extra: Any) -> Any:
    """Create a dataclass field that is also a command-line flag.

    Args:
        default: a list is copied for each object. ``REQUIRED`` means that a value must be given.
        help_text: the help; ``{item}`` in it becomes the noun of the command's items, such as "video".
        extra: the field's metadata: metavar, choices, positional, secret (the value is left out of the repr), several
            (a list takes several values after one flag), flag (the flag's name if it is not the field's), share (a
            number that may be given in percent) and group (the title above this option and those that follow it in
            ``--help``).
    """
    metadata = {"help": help_text, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata, repr=not extra.get("secret"))


def check(ok: bool, name: str, requirement: str, value: object) -> None:
    """Raise UsageError("--NAME must be REQUIREMENT, got VALUE") unless ``ok`` is True."""
    if not ok:
        raise UsageError(f"--{name.replace('_', '-')} must be {requirement}, got {value!r}")


def check_ratio(name: str, value: float | None) -> None:
    """Raise UsageError that names the flag unless ``value`` is None or in (0, 1]."""
    if value is not None and not 0.0 < value <= 1.0:
        raise UsageError(f"--{name.replace('_', '-')} must be in (0, 1], got {value!r}{suggest_percentage(value)}")


def suggest_percentage(value: float) -> str:
    """Return "; did you mean 25%?" for a number above 1 and up to 100, otherwise ""."""
    return f"; did you mean {value:g}%?" if 1.0 < value <= 100.0 else ""


def check_choices(config: Any) -> None:
    """Raise UsageError if an option with ``choices`` is neither None nor one of them, wherever the value comes from."""
    for item in fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        check(not choices or value is None or value in choices, item.name, f"one of {choices}", value)


def parse_named_values(texts: Iterable[str], flag: str) -> dict[str, str]:
    """Parse NAME=VALUE arguments into texts by name; the last value of a repeated name counts.

    Blanks around names and values are dropped, and "-" in a name becomes "_". UsageError, which names ``flag``, is
    raised for an argument that has no "=" or no name before it.
    """
    params: dict[str, str] = {}
    for item in texts:
        name, equals, value = item.partition("=")
        if not (name.strip() and equals):
            raise UsageError(f"{flag} takes NAME=VALUE, got {item!r}")
        params[name.strip().replace("-", "_")] = value.strip()
    return params


def is_positive(value: float) -> bool:
    """Return True if a number is finite and above 0."""
    return math.isfinite(value) and value > 0


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """The options of commands that may read or write objects on S3."""

    s3_endpoint: str | None = option(
        None,
        "address of the S3 API, where it is not Amazon's (default: AWS_ENDPOINT_URL, or that of the AWS profile)",
        metavar="URL",
        secret=True,
        group="S3",
    )
    s3_requester_pays: bool = option(
        False, "read videos and questions also from buckets whose owners let the reader pay, and pay for it"
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(S3Options):
    """The options of every run on Ray. A subclass sets ``item``, the noun for what the run processes: "video"."""

    item: ClassVar[str]

    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id", metavar="REV", group="model")
    device: str = option("auto", "where the model runs; auto is cuda if the cluster has GPUs", choices=DEVICES)
    attn: str = option("auto", "attention kernel; auto is flash-attn 2 where it is installed, else sdpa", choices=ATTN)
    min_gpus: int = option(
        0,
        "wait until the cluster has N GPUs, --stall-timeout at most, for nodes that join late; without a GPU --device "
        "auto takes the CPU",
        metavar="N",
    )
    max_gpus: int | None = option(
        None,
        "use at most N GPUs of the cluster, also of nodes that join later; an autoscaling cluster is asked for N GPUs",
        metavar="N",
    )
    join: bool = option(
        False,
        "write beside another run to the same place instead of refusing; if both write a row, readers use one of them",
    )
    retry_failed: bool = option(False, "try failed {item}s again", group="failures and progress")
    max_attempts: int = option(
        3, "attempts at a {item} in all, by --retry-failed and by a run's second pass", metavar="N"
    )
    max_failed: str | None = option(
        None,
        "end with exit code 1 if more {item}s fail: a count (10) or a share (0.05 or 5%%) (default: all but one; in "
        "jobs.prune 10 or 5%% for infrastructure errors: io, memory of a GPU), or if one fails as "
        "internal or own-code",
        metavar="LIMIT",
    )
    stall_timeout: float = option(
        1800.0,
        "fail if no {item} moves to the next stage for S seconds, and name the stage; S must be longer than the model "
        "takes to load, and than a batch takes",
        metavar="S",
    )
    flush_seconds: float = option(
        60.0,
        "write at least every S seconds; a stopped run loses at most this much work. A run that does less than a shard "
        "in this time writes small shards, which stay small",
        metavar="S",
    )
    log_interval: float = option(30.0, "print progress every S seconds where the output is not a terminal", metavar="S")

    def __post_init__(self) -> None:
        """Check all options.

        Raises:
            UsageError: the first invalid value, whose flag it names; also an integer of 2^63 or more, and ``min_gpus``
                with ``device`` "cpu".
        """
        check_choices(self)
        check(self.max_attempts >= 1, "max_attempts", "at least 1", self.max_attempts)
        check(self.min_gpus >= 0, "min_gpus", "at least 0", self.min_gpus)
        least = max(1, self.min_gpus)
        check(self.max_gpus is None or self.max_gpus >= least, "max_gpus", f"at least {least}", self.max_gpus)
        if self.min_gpus and self.device == "cpu":
            raise UsageError(f"--min-gpus {self.min_gpus} and --device cpu do not go together")
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            check(not isinstance(value, int) or abs(value) < 2**63, name, "a number below 2^63", value)
        for name in ("stall_timeout", "flush_seconds", "log_interval"):
            check(is_positive(getattr(self, name)), name, "a positive number of seconds", getattr(self, name))
        self.compute_failure_limit(1)  # raises for a --max-failed that is neither a count nor a share

    def compute_failure_limit(self, total: int) -> int:
        """Return how many of ``total`` items may fail before the run counts as failed: by default all but one."""
        return max(0, total - 1) if self.max_failed is None else _parse_failure_limit(self.max_failed.strip(), total)

    def compute_infrastructure_limit(self, total: int) -> int:
        """Return the number of infrastructure errors, out of ``total`` items, above which the run counts as failed.

        It is ``--max-failed`` if that is given, otherwise 10 or 5 %, whichever is more.
        """
        if self.max_failed is not None:
            return self.compute_failure_limit(total)
        return max(OUTSIDE_COUNT, math.floor(OUTSIDE_SHARE * total + 1e-9))

    def as_record(self) -> dict[str, Json]:
        """Return all options by name, ready for JSON, for the run's record; a secret that is set becomes "(set)"."""
        values = {item.name: (getattr(self, item.name), item.metadata.get("secret")) for item in fields(self)}
        return {name: "(set)" if secret and value is not None else value for name, (value, secret) in values.items()}

    def list_changed_values(self) -> dict[str, Json]:
        """Return the entries of ``as_record`` that differ from the default."""
        defaults = {
            item.name: item.default if item.default_factory is MISSING else item.default_factory()
            for item in fields(self)
        }
        return {name: value for name, value in self.as_record().items() if value != defaults[name]}


@dataclass(frozen=True, kw_only=True)
class PrunerOptions(RunOptions):
    """The options of runs with one pruning method."""

    pruner_param: list[str] = option(
        [], "a parameter of the method, e.g. alpha=0.5 or K=3; may be repeated", metavar="NAME=VALUE", group="pruning"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pruner_params()

    def pruner_params(self) -> dict[str, str]:
        """Parse ``--pruner-param`` into texts by parameter name. Raises UsageError for an argument without "="."""
        return parse_named_values(self.pruner_param, "--pruner-param")


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """The option of commands that continue results of a user method."""

    on_changed: str = option(
        "refuse",
        "what to do if the code of your own method has changed since the stored results were made: refuse, or make all "
        "its results again",
        choices=("refuse", "redo"),
        group="your own method",
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(RunOptions, CodeOptions):
    """The options of runs that answer questions: the engine that computes the answers, and its arguments."""

    engine: str = option(
        "transformers",
        "the engine that computes answers; vllm is for serving at scale, and needs an environment of its own: pip "
        "install -e '.[vllm]'",
        choices=ENGINES,
        group="engine",
    )
    tensor_parallel: int = option(1, "with --engine vllm: spread one model over N GPUs", metavar="N")
    engine_param: list[str] = option(
        [],
        "with --engine vllm: an engine argument of its own, e.g. gpu_memory_utilization=0.8; may be repeated",
        metavar="NAME=VALUE",
    )
    batch_size: int | None = option(
        None,
        "give the model N questions at once (default: 8; with vllm, which batches them itself, 256)",
        metavar="N",
    )

    def __post_init__(self) -> None:
        """Check all options.

        Raises:
            UsageError: the first invalid value, whose flag it names; ``max_gpus`` below ``tensor_parallel``; or an
                option of vLLM with another engine.
        """
        super().__post_init__()
        check(self.tensor_parallel >= 1, "tensor_parallel", "at least 1", self.tensor_parallel)
        check(self.batch_size is None or self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        self.engine_params()
        if self.max_gpus is not None and self.max_gpus < self.tensor_parallel:
            raise UsageError(
                f"--max-gpus {self.max_gpus} does not suffice for one model of --tensor-parallel {self.tensor_parallel}"
            )
        if self.engine == "transformers":
            for name, off in (("tensor_parallel", 1), ("engine_param", [])):
                if getattr(self, name) != off:
                    raise UsageError(f"--{name.replace('_', '-')} goes with --engine vllm")

    def engine_params(self) -> dict[str, Json]:
        """Parse ``--engine-param`` into values by name. Raises UsageError for an argument without "="."""
        return parse_engine_values(self.engine_param)

    def as_record(self) -> dict[str, Json]:
        """Return all options by name, ready for JSON, for the record of the run.

        A secret that is set becomes "(set)", and so does an engine argument whose name ends like a secret's, such as
        ``hf_token``.
        """
        shown: list[Json] = []
        for text in self.engine_param:
            name = text.partition("=")[0]
            shown.append(f"{name}=(set)" if name.strip().replace("-", "_").endswith(_SECRET_ENDINGS) else text)
        return {**super().as_record(), "engine_param": shown}


def parse_engine_values(texts: Iterable[str]) -> dict[str, Json]:
    """Parse NAME=VALUE engine arguments; a value that is not JSON stays text. Raises UsageError without "="."""
    return {name: _parse_json_or_text(text) for name, text in parse_named_values(texts, "--engine-param").items()}


def read_ids(flag: str, name: str) -> list[str]:
    """Read the different video ids, in order, from a text file with one id per line; blank lines are skipped.

    Args:
        flag: the flag that names the file, without "--", for errors.
        name: the path of the file, in UTF-8.

    Raises:
        UsageError: the file cannot be read, has no id, or its first id begins with ``{"``, as JSON does.
    """
    try:
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{flag} {name}: it cannot be read: {error}") from error
    ids = list(dict.fromkeys(line.removesuffix("\r") for line in lines if line.strip()))
    if not ids:
        raise UsageError(f"--{flag} {name}: it names no video")
    if ids[0].startswith('{"'):  # a removal would bar such ids for good, and leave the videos
        raise UsageError(f"--{flag} {name}: it takes an id a line, not JSON: jq -r .video_id makes them")
    return ids


def _parse_json_or_text(text: str) -> Json:
    """Decode ``text`` as JSON; return it unchanged if it is not JSON."""
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    return value


def _parse_failure_limit(text: str, total: int) -> int:
    """Convert ``--max-failed`` to a number of items.

    "10" is a count; "0.05" and "5%" are shares of ``total``, rounded down. A number with a decimal point or an exponent
    is a share, so "1.0" means all items.

    Raises:
        UsageError: the text is not a number, the count is negative, or the share is not in [0, 1].
    """
    try:
        if set(text.lower()).isdisjoint("%.e"):  # Python writes 0.00001 as 1e-05
            count = int(text)
            check(count >= 0, "max_failed", "a count or a share", text)
            return count
        failed_share = parse_share(text)
    except ValueError as error:
        raise UsageError(f"--max-failed is a count (10) or a share (0.05 or 5%), got {text!r}") from error
    check(0.0 <= failed_share <= 1.0, "max_failed", "a share in [0, 1]", text)
    return math.floor(failed_share * total + 1e-9)


# The Python types that a field of each type accepts, and how messages name these types.
_TEXT = (str, os.PathLike)
_ACCEPTED_TYPES = {int: (Integral,), float: (Real,), bool: (bool,), str: (*_TEXT, Real)}
_LIST_NAMES = {str: "texts", float: "numbers"}
# Options by which a command does something else than its work; from Python they would have no effect.
_OF_COMMANDS = frozenset(
    {"dry_run", "index", "plan", "probe", "gpus", "gpu_type", "decode_cores", "price"}
    | {"corpus_videos", "seconds", "size"}
)
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def check_options(config: type, values_given: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """Convert options from a file or from Python, by field name, to the types of the fields of ``config``.

    Only these conversions are done:

    - an int to a float, a number or a path to text, a tuple to a list, and None to an empty list
    - a mapping to a list of NAME=VALUE, for options with that metavar
    - a text in percent to a number, for a share
    - a single text to a list, for a positional argument that takes several words

    Args:
        where: the beginning of error messages.

    Raises:
        UsageError: an option does not exist, or a value has another type.
    """
    known_fields = {item.name: item for item in fields(config)}
    if unknown := [name for name in values_given if name not in known_fields]:
        near = [match for name in unknown for match in get_close_matches(name, known_fields, 1)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known_fields)}"
        raise UsageError(f"{where}unknown option {', '.join(unknown)}; {hint}")
    hints = get_type_hints(config)
    values = {
        name: _convert_to_pairs(value) if known_fields[name].metadata.get("metavar") == "NAME=VALUE" else value
        for name, value in values_given.items()
    }
    for name, value in values.items():
        if known_fields[name].metadata.get("share"):
            values[name] = (
                [_convert_share(share_text) for share_text in value]
                if isinstance(value, list)
                else _convert_share(value)
            )
        if (
            known_fields[name].metadata.get("positional")
            and isinstance(value, _TEXT)
            and get_origin(hints[name]) is list
        ):
            values[name] = [value]  # a single word of the command
    return {name: _check_value(value, hints[name], f"{where}{name}") for name, value in values.items()}


def make_config(
    kind: type[C], function: str, options: Mapping[str, object], accepted_names: Collection[str] | None = None
) -> C:
    """Create a configuration from the keyword arguments of a Python function.

    Args:
        function: the function's name, for errors.
        accepted_names: the fields that the function accepts; None accepts all fields except those that are meant for
            the command line, such as ``dry_run`` and ``plan``.

    Raises:
        UsageError: an option does not exist or is not accepted, or its value is invalid.
    """
    accepted_names = (
        [item.name for item in fields(kind) if item.name not in _OF_COMMANDS]
        if accepted_names is None
        else accepted_names
    )
    for name in sorted(options.keys() & {item.name for item in fields(kind)} - set(accepted_names)):
        raise UsageError(
            f"{function}() takes no {name}, which is for the command; it takes {', '.join(sorted(accepted_names))}"
        )
    return kind(**check_options(kind, options, f"{function}(): "))


def parse_share(text: str) -> float:
    """Parse a share as a number ("0.25") or in percent ("25%"). Raises ValueError for any other text."""
    number, percent, ending = text.partition("%")
    if ending.strip():
        raise ValueError(f"{text!r} is no share")
    return float(number) / 100 if percent else float(number)


def get_value_type(hint: Any) -> Any:
    """Return the type of an optional value without None (``int`` for ``int | None``), or any other type unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _convert_to_pairs(value: object) -> object:
    """Convert a mapping to a list of NAME=VALUE; other values are returned unchanged."""
    if not isinstance(value, Mapping):
        return value
    return [f"{name}={str(of).lower() if of is None or isinstance(of, bool) else of}" for name, of in value.items()]


def _convert_share(value: object) -> object:
    """Convert a text such as "25%" to a number; any other value stays."""
    try:
        return parse_share(value) if isinstance(value, str) and value.endswith("%") else value
    except ValueError:
        return value


def _check_value(value: Any, hint: Any, where: str) -> Any:
    """Convert the value of an option to the type ``hint``.

    None becomes [] for a list. A bool is not accepted as a number. A path or a number is accepted as text, but in a
    list of texts only a path is.

    Raises:
        UsageError: the value has another type; the message begins with ``where``.
    """
    kind = get_value_type(hint)
    if value is None and kind is not hint:
        return None
    if value is None and get_origin(kind) is list:
        return []
    if get_origin(kind) is list:
        (of,) = get_args(kind)
        if not isinstance(value, list | tuple) or (of is str and not all(isinstance(item, _TEXT) for item in value)):
            raise UsageError(f"{where} must be a list of {_LIST_NAMES[of]}, got {value!r}")
        return [_check_value(item, of, where) for item in value]
    with suppress(OverflowError):  # a number beyond all floats
        if isinstance(value, _ACCEPTED_TYPES[kind]) and (kind is bool or not isinstance(value, bool)):
            return kind(value)
    raise UsageError(f"{where} must be {_WORDS[kind]}, got {value!r}")
