"""Rendering chat templates within limits: Jinja's sandbox, in which transformers runs them, lets them run forever."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from gstep.errors import ModelError
from gstep.language.types import ChatMessage

#: CPU seconds that a rendering may take in its thread; published templates take milliseconds.
MAX_RENDER_S = 5.0
_MAX_PART_S = 0.005  # added per message part; published templates render thousands of them per second
#: Bytes by which the process may grow during a rendering. Limits are checked after each step; none ends a single step.
MAX_RENDER_BYTES = 2**30
_SLOW_STEP_S = 0.005  # CPU seconds of a single step that may have allocated much
_TEMPLATE_CODE = "<template>"  # Jinja's file name for the code of a template
_REMEDY = "copy chat_template.jinja from the original checkpoint"


class _LimitReachedError(BaseException):
    """A rendering reached a limit. It is not an Exception, because some of Jinja's filters catch those."""


def render_chat_template(tokenizer: Any, template: str, messages: Sequence[ChatMessage]) -> str:
    """Apply a chat template to a conversation, up to the start of the model's next message, as transformers does.

    The thread's trace function is replaced meanwhile, to check the limits. Works in any thread.

    Raises:
        ModelError: the template is not valid, has the operator ``**``, or exceeds 5 s of CPU time (plus 5 ms per
            message part), a growth of 1 GiB, the free memory or Python's recursion limit.
        ValueError: the template raises an error for this conversation.
    """
    earlier_tracer = sys.gettrace()
    try:
        _refuse_powers(template)
        sys.settrace(_LimitTracer(MAX_RENDER_S + _MAX_PART_S * sum(len(message["content"]) for message in messages)))
        text: str = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except (_LimitReachedError, MemoryError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ModelError(f"the chat template of this model goes beyond a limit ({reason}): {_REMEDY}") from None
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template of this model is not valid ({error}): {_REMEDY}") from error
    except Exception as error:  # raised by the template itself, or by Python in its expressions
        raise ValueError(f"the chat template of this model fails ({type(error).__name__}: {error})") from error
    finally:
        sys.settrace(earlier_tracer)
    return text


@lru_cache(maxsize=8)
def _refuse_powers(template: str) -> None:
    """Raise _LimitReachedError for the operator ``**``: a power of large numbers is one step, which nothing stops."""
    if any(kind == "operator" and value == "**" for _, kind, value in Environment().lex(template)):
        raise _LimitReachedError("it computes powers")


class _LimitTracer:
    """A trace function that raises _LimitReachedError when the thread that it traces has reached a limit.

    Python calls it for each function call and for each line of a template. Only CPU time of this thread counts.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._start_s = self._last_s = time.thread_time()
        self._start_bytes = _count_resident_bytes()

    def __call__(self, frame: FrameType, event: str, arg: object) -> _LimitTracer | None:
        """Raise _LimitReachedError if the CPU time or the growth of the process exceeds its limit.

        Memory is only read after a step of more than _SLOW_STEP_S. The result is the tracer for template code, so that
        its lines are traced, and None for other code.
        """
        now_s = time.thread_time()
        if now_s - self._start_s > self._max_s:
            raise _LimitReachedError(f"{self._max_s:.1f} s of CPU time have passed")
        if now_s - self._last_s > _SLOW_STEP_S and _count_resident_bytes() - self._start_bytes > MAX_RENDER_BYTES:
            raise _LimitReachedError(f"it takes more than {MAX_RENDER_BYTES >> 30} GiB of memory")
        self._last_s = now_s
        return self if frame.f_code.co_filename == _TEMPLATE_CODE else None


def _count_resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
