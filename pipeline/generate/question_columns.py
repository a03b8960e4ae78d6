"""The columns of a questions file that are read, and names that are nearly theirs, which are refused.

A column that nothing reads is carried along to the answers. So a setting under a slightly wrong name would change
nothing, and nobody would notice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

from pipeline.errors import QuestionsError
from pipeline.inputs.tables import UserRow, UserValue, is_nan, number_of

#: The options of decoding that a question may have of its own, with their types.
DECODING_OPTIONS: Mapping[str, type] = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
}
KNOWN_COLUMNS = ("question_id", "video_id", "prompt", "messages", "choices", "answer", "system", *DECODING_OPTIONS)
_MIN_LETTERS = 5  # of names that may differ by a letter: speed is no seed
# Names that other tools use, as ``_fold`` returns them.
_SYNONYMS = {
    "question": "prompt",
    "query": "prompt",
    "conversation": "messages",
    "option": "choices",
    "candidate": "choices",
    "answerchoice": "choices",
    "systemprompt": "system",
    "systemmessage": "system",
    **dict.fromkeys(
        ("maxtoken", "maxcompletiontoken", "maxoutputtoken", "maxgentoken", "maxgentok", "maxlength"), "max_new_tokens"
    ),
}
# Settings of OpenAI, vLLM, transformers and lmms-eval that questions do not have here, as ``_fold`` returns them.
_UNKNOWN_SETTINGS = frozenset(
    (
        *("stop", "stoptokenid", "stopsequence", "stopstring", "until", "dosample", "numbeam", "minp", "mintoken"),
        *("minnewtoken", "repetitionpenalty", "frequencypenalty", "presencepenalty", "lengthpenalty", "logitbias"),
        *("responseformat",),
    )
)
_TIMES = ("stop", "until")  # where the value is a number


def refuse_near_names(row: UserRow, where: str) -> None:
    """Raise QuestionsError if a column of a row seems to be meant for a column that the row lacks.

    A near name differs from the right one only by case, underscores and a plural s, or by one letter of at least five,
    or it is the name in other tools. Empty cells are no columns here. A row that has the right column may have near
    names too: they are the user's own. Settings of other tools that no question has here are refused as well.
    """
    given = {str(name): value for name, value in row.items() if not _is_empty(value)}
    lacking = {name for name in KNOWN_COLUMNS if name not in given}
    if "messages" in given:
        lacking.discard("prompt")
    for name, value in given.items():
        if name in KNOWN_COLUMNS:
            continue
        if (near := find_near(name)) in lacking:
            raise QuestionsError(
                f"{where}: no column {name} is read (did you mean {near}?): rename it to {near}, or to another name if "
                "it is a column of your own"
            )
        if (setting := _fold(name)) in _UNKNOWN_SETTINGS and not (setting in _TIMES and _is_number(value)):
            raise QuestionsError(
                f"{where}: {name} is a setting that questions do not have here (they have "
                f"{', '.join(DECODING_OPTIONS)}): leave it out, or rename it if it is a column of your own"
            )


@lru_cache(maxsize=1024)
def find_near(name: str) -> str | None:
    """Return the known column that a column of another name seems to be meant for, or None."""
    folded = _fold(name)
    if folded in _SYNONYMS:
        return _SYNONYMS[folded]
    for known in KNOWN_COLUMNS:
        if folded == _fold(known):
            return known
    for known in KNOWN_COLUMNS:
        # A further word or a number is no typing error: answer_a and prompt2 are names of their own.
        is_comparable = len(_split_words(name)) == len(_split_words(known)) and folded.isalpha()
        letters = _fold(known)
        if is_comparable and min(len(folded), len(letters)) >= _MIN_LETTERS and _differ_by_one_edit(folded, letters):
            return known
    return None


def _split_words(name: str) -> list[str]:
    """Split a name into its words in lower case: at all that is no letter or number, and before capitals."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _fold(name: str) -> str:
    """Return a name in lower case without anything but letters and numbers, and without the s of a plural."""
    *words, last = _split_words(name) or [""]
    return "".join([*words, last.removesuffix("s") or last])


def _differ_by_one_edit(a: str, b: str) -> bool:
    """Return True if one letter more, less or changed, or two neighbors that are swapped, make one text the other."""
    short, long = sorted((a, b), key=len)
    same = next((i for i, (x, y) in enumerate(zip(short, long, strict=False)) if x != y), len(short))
    if len(short) < len(long):
        return short[same:] == long[same + 1 :]
    swapped = short[same + 1 : same + 2] + short[same : same + 1]
    return short[same + 1 :] == long[same + 1 :] or swapped + short[same + 2 :] == long[same:]


def _is_empty(value: UserValue) -> bool:
    """Return True for a cell without a value; NaN is one where pandas wrote the row."""
    return value is None or (isinstance(value, str | list) and not value) or is_nan(value)


def _is_number(value: UserValue) -> bool:
    """Return True for a number, and for the text of one."""
    return not math.isnan(number_of(value))
