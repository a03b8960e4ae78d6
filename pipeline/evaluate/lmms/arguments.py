"""``--model_args`` of lmms-eval as typed options; undoes what lmms-eval's parser does to values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from gstep.pruners import find_method
from pipeline.cache.header import CacheIdentity, compute_fingerprint
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.evaluate.protocols import LMMS_EVAL_0_7, ModelRules
from pipeline.generate.config import GenerateConfig
from pipeline.rows import JsonObject

EMPTY, ERROR = "empty", "error"
#: Name in ``--model_args`` -> name in GenerateConfig, for options whose names differ.
_OPTION_NAMES = {"pretrained": "model", "method": "pruner", "answers": "out", "seed": "pruner_seed"}
_SAME = (
    *("cache", "revision", "retention_ratio", "siglip", "positions", "order", "rule"),
    *("device", "dtype", "attn", "batch_size"),
)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The options of ``--model_args``. None and "auto" stand for the default of jobs.generate.

    Attributes:
        answers: a folder or prefix, in which answers are committed batch by batch.
        pretrained: the model that the cache was made with; None is the one that the cache names.
        method: prunes a cache of all tokens when a question is asked, with ``parameters`` and ``retention_ratio``.
        seed: seed of random methods and of sampled answers.
        frame_times: the frame times in prompts of Qwen3-VL; None is the choice of lmms-eval's own class.
        system: the system message; None is that of lmms-eval's own class, "" is the chat template's.
        fingerprint: the expected fingerprint of the cache's identity; None accepts any cache.
        video_id: template of video ids with fields of the document in braces, such as ``videos/{clip}.mp4``.
        missing: what happens to a question without an answer: "error", or "empty" for an empty reply.
        parameters: parameters of the method as texts; in ``--model_args``, each is a separate keyword.
    """

    cache: str
    answers: str
    pretrained: str | None = None
    revision: str | None = None
    method: str | None = None
    retention_ratio: float | None = None
    siglip: str | None = None
    seed: int = 0
    positions: str = "auto"
    order: str = "auto"
    rule: str = "transformers-5"
    frame_times: str | None = None
    system: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"
    batch_size: int | None = None
    fingerprint: str | None = None
    video_id: str | None = None
    missing: str = ERROR
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, values: JsonObject) -> ModelArguments:
        """Read the keywords with which lmms-eval creates a model; unknown names become parameters of the method.

        The method's code is imported. Only the types of other values are checked, and ``missing``.

        Raises:
            UsageError: ``cache`` or ``answers`` is missing, a value is invalid, or a name is neither an option nor a
                parameter of the method.
        """
        for name in ("cache", "answers"):
            if values.get(name) in (None, ""):
                raise UsageError(f"--model_args: {name}=PATH is missing; known are {', '.join(_KNOWN_NAMES)}")
        known_values = {name: _parse_value(name, value) for name, value in values.items() if name in _KNOWN_NAMES}
        method_values = {name: value for name, value in values.items() if name not in _KNOWN_NAMES}
        arguments = cls(**known_values, parameters=_select_parameters(method_values, known_values.get("method")))
        if arguments.missing not in (ERROR, EMPTY):
            raise UsageError(f"--model_args: missing must be {ERROR} or {EMPTY}, got {arguments.missing!r}")
        return arguments

    def config(self, identity: CacheIdentity) -> GenerateConfig:
        """Return the options of jobs.generate for a cache with this identity; failed questions are asked again.

        ``system`` and ``frame_times`` default to those of lmms-eval for the cache's model type. ``seed`` is passed only
        with a method.

        Raises:
            UsageError: the options are invalid or contradict each other.
        """
        model_type = identity["model"]["type"]
        rules = LMMS_EVAL_0_7.get(model_type, ModelRules())
        rules = rules.adapt_to_family(model_type, identity["model"].get("family", model_type))
        system = rules.system if self.system is None else self.system or None
        return GenerateConfig(
            questions="lmms-eval",
            choices="generate",
            retry_failed=True,
            system=system,
            frame_times=self.frame_times or rules.frame_times,
            pruner_param=[f"{name}={text}" for name, text in self.parameters.items()],
            **{name: getattr(self, name) for name in _SAME},
            **{
                name: getattr(self, name_here)
                for name_here, name in _OPTION_NAMES.items()
                if name_here != "seed" or self.method
            },
        )

    def check_fingerprint(self, identity: CacheIdentity) -> str:
        """Return the fingerprint of a cache's identity; raise IdentityMismatch if ``--model_args`` name another."""
        actual = compute_fingerprint(identity)
        if self.fingerprint not in (None, actual):
            raise IdentityMismatch(
                f"{self.cache} has the fingerprint {actual}, but --model_args say fingerprint={self.fingerprint}: it "
                "is another cache, or it was made again with other settings (jobs.inspect shows them). To ask it, "
                f"give fingerprint={actual} and another answers=PATH"
            )
        return actual


_KNOWN_NAMES = tuple(item.name for item in fields(ModelArguments) if item.name != "parameters")
_NUMBERS: Mapping[str, type] = {"retention_ratio": float, "seed": int, "batch_size": int}


@contextmanager
def explain_flags() -> Iterator[None]:
    """Extend a UsageError that is raised inside this context by what its flags are called in ``--model_args``.

    The error keeps its class. A message without "--", and other errors, pass unchanged.
    """
    try:
        yield
    except UsageError as error:
        if "--" not in str(error):
            raise
        names = ", ".join(f"--{flag.replace('_', '-')} is {name_here}=" for name_here, flag in _OPTION_NAMES.items())
        raise type(error)(f"{error} (flags are --model_args here: {names}, others by their names)") from error


def _parse_value(name: str, value: Any) -> Any:
    """Convert an option's value to its type, because lmms-eval turns some texts into numbers and keeps quotes.

    None stays None, ``batch_size=auto`` becomes None, and outer quotes of text are removed.

    Raises:
        UsageError: a text option got another type, or a number is not of the right kind.
    """
    if value is None:
        return None
    if name not in _NUMBERS:
        if isinstance(value, str):
            return _unquote(value)
        raise UsageError(
            f"--model_args: {name} must be text, and lmms-eval made {value!r} of it: write a path as ./{value}, and "
            "the name of a folder or a model so that it is no number"
        )
    if name == "batch_size" and value == "auto":
        return None
    kind = _NUMBERS[name]
    try:
        number = kind(value)
        if isinstance(value, bool) or number != float(value):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be {'a whole' if kind is int else 'a'} number, got {value!r}") from error
    return number


def _unquote(text: str) -> str:
    """Return a text without the quotes around it; others stay unchanged."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


def _select_parameters(values: JsonObject, method: str | None) -> dict[str, str]:
    """Return the values of names that are not options as texts, for the method; the method's code is imported.

    Raises:
        UsageError: the method does not exist or has no such parameter; without a method, any name.
    """
    accepted_names: list[str] = []
    if method is not None:
        try:
            accepted_names = [item.name for item in fields(find_method(method)) if item.init]
        except ValueError as error:
            raise UsageError(str(error)) from error
    for name in values:
        if name not in accepted_names:
            close = get_close_matches(name, [*_KNOWN_NAMES, *accepted_names], n=1)
            meant = f"did you mean {close[0]}?" if close else f"known are {', '.join([*_KNOWN_NAMES, *accepted_names])}"
            raise UsageError(f"--model_args: there is no {name}; {meant}")
    return {name: _format_value(value) for name, value in values.items()}


def _format_value(value: Any) -> str:
    """Return a value as the text that a user would type for it: True is "true", 2.0 is "2", and quotes are removed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _unquote(str(value))
