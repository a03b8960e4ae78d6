"""A study as Markdown: each table with what it shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from jobs.testbed.markdown import head, row
from jobs.testbed.studying.knock_out import VARIANTS
from jobs.testbed.studying.record import ALL, KINDS, MethodRecord, Share, StudyRecord
from pipeline.evaluate.shapes.questions import TYPES
from pipeline.evaluate.statistics.render import method_title

_READ = """\
Percent, ± one standard error clustered by video, and in brackets the number of questions or things. Chance is 25 % of
the questions."""
_KNOCK_OUT = """\
Does the model answer from where the answer is seen? The evidence of a question is every token that a box of what it
asks about touches, in all frames; the others are as many random tokens beside them. Where answers come from the
evidence, taking it away costs much, taking others away costs little, and the evidence alone is nearly enough. Without
it answers may stay above chance: tokens beside it may know of it through the vision encoder, and other things that are
still seen rule out choices. Positions are the original ones, so that no token moves."""
_SHORT = """\
Of {count} questions the evidence touches more than half of all tokens; there all others were taken away, which are
fewer."""
_SEEN = """\
Does a method lose an answer because it drops the evidence? A question counts as seen where kept tokens show every part
that decides the answer (for questions about onsets: in the frame of the onset), else as gone.
{least} A merged token counts where it is put.
The two columns have different questions: a method may keep what is easy."""
_ANY = "A token shows a thing that touches its cell at all."
_LEAST = "A token shows a thing that covers more than {least:g} of its cell."
_ONSETS = """\
Which things does a method notice when they come? Of the things that questions about onsets (quarter, order, onset)
name, each once: the share of which a kept token shows the thing, as above, in the frame in which it is first seen. A
brief thing is gone after a few frames, a static one stays in its place, a moving one does not."""
_TYPES = """\
Where does a method lose? Right answers by type of question; the first row keeps all tokens."""
_INSIDE = """\
Methods that drop tokens inside the language model ({names}) are in the last tables alone: its first layers see all."""


def markdown(record: StudyRecord) -> str:
    """The four tables."""
    about, methods = record["about"], record["methods"]
    seeing = [method for method in methods if method["seen"] is not None]
    shows = _LEAST.format(least=about["least"]) if about["least"] else _ANY
    sections = [
        "# What answers rest on",
        f"Model `{about['model']}`, {about['videos']} videos, {about['questions']} questions. What methods keep has "
        f"{about['positions']} positions.",
        _READ,
        "## Knock-out",
        _KNOCK_OUT,
        "\n".join(_knock_out(record)),
    ]
    if record["short_of_others"]:
        sections.append(_SHORT.format(count=len(record["short_of_others"])))
    sections += ["## Seen or gone", _SEEN.format(least=shows), "\n".join(_seen(seeing))]
    sections += ["## Onsets", _ONSETS, "\n".join(_onsets(seeing))]
    if inside := dict.fromkeys(method_title(one["method"]) for one in methods if one["seen"] is None):
        sections.append(_INSIDE.format(names="; ".join(inside)))
    sections += ["## By type of question", _TYPES]
    for ratio, group in groupby(methods, key=lambda one: one["retention_ratio"]):
        sections += [f"### {100 * ratio:g} % kept", "\n".join(_by_type(record["knock_out"]["all"], list(group)))]
    return "\n\n".join(sections) + "\n"


def _knock_out(record: StudyRecord) -> Iterator[str]:
    variants = record["knock_out"]
    yield from head(["Question", *VARIANTS.values()])
    for kind in variants["all"]:
        yield row([kind, *(_cell(variants[name].get(kind)) for name in VARIANTS)])


def _seen(methods: Sequence[MethodRecord]) -> Iterator[str]:
    yield from head(["Method", "kept", "seen", "gone"])
    for one in methods:
        yield row([*_named(one), _cell(one["seen"]), _cell(one["gone"])])


def _onsets(methods: Sequence[MethodRecord]) -> Iterator[str]:
    columns = (*KINDS, ALL)
    yield from head(["Method", "kept", *columns])
    for one in methods:
        yield row([*_named(one), *(_cell((one["onsets"] or {}).get(kind)) for kind in columns)])


def _by_type(whole: Mapping[str, Share], methods: Sequence[MethodRecord]) -> Iterator[str]:
    columns = [kind for kind in (*TYPES, ALL) if kind in whole]
    yield from head(["Method", *columns])
    yield row(["all tokens", *(_cell(whole[kind]) for kind in columns)])
    for one in methods:
        yield row([method_title(one["method"]), *(_cell(one["by_type"].get(kind)) for kind in columns)])


def _named(one: MethodRecord) -> list[str]:
    return [method_title(one["method"]), f"{100 * one['retention_ratio']:g} %"]


def _cell(share: Share | None) -> str:
    if share is None or not share["count"]:
        return "–"
    error = "" if share["error"] is None else f" ± {100 * share['error']:.1f}"
    return f"{100 * share['yes'] / share['count']:.1f}{error} ({share['count']})"
