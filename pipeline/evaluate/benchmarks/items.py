"""Questions of benchmarks, and the faults of their annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.errors import UsageError, make_printable
from pipeline.evaluate.benchmarks.annotations import FaultKind, NotAskable, strip_option_letter
from pipeline.generate.questions import explain_count_from_1

_MAX_WRONG_SHARE = 0.5  # share of questions; in the published files, at most 2 of 355 answers are not options


@dataclass(frozen=True)
class AnnotationFault:
    """A fault of an annotation row.

    Attributes:
        kind: bad-row (a needed column is empty or has another type), missing-video, policy (the path leads outside the
            data folder), repeated-question (the same id again, or the same question about the same video),
            repeated-candidate, blank-candidate, answer-no-candidate (no reply can be right), no-answer (-1: it is not
            published), other-media (not about exactly one video file), not-counted (the benchmark's own number leaves
            it out).
        question_id: None if the row has none.
        message: printable text of at most 1 KB that names the row.
    """

    kind: FaultKind
    question_id: str | None
    message: str
    left_out: bool


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question of a benchmark with its videos, options and right answer.

    Attributes:
        question_id: unique in the benchmark; may begin with "-".
        video_ids: the ids of its videos in the order of the prompt: POSIX paths relative to the data folder, with the
            bounds of a clip appended (``make_clip_id``). Only users' own questions may have several.
        path: the path of the video relative to the data folder; "" if the ids are the paths.
        start_s, end_s: the clip in seconds; None: from the start, or to the end.
        conversation: JSON of the messages of which ``question`` is the last; None without.
        options: the options in the file, including letters before them; () for a free answer.
        answer: index of the right option; None if no option is right, and for a free answer.
        expected: the answer in the file; None if it is not published.
        splits: the question's part by name of a split.
        cluster: questions with the same cluster, mostly a video, are resampled together.
    """

    question_id: str
    video_ids: tuple[str, ...]
    path: str = ""
    start_s: float | None = None
    end_s: float | None = None
    question: str
    conversation: str | None = None
    options: tuple[str, ...] = ()
    answer: int | None = None
    expected: str | None
    splits: Mapping[str, str] = field(default_factory=dict)
    cluster: str

    @property
    def video_id(self) -> str:
        """The id of the first video."""
        return self.video_ids[0]

    def make_manifest_rows(self, folder: Path) -> list[dict[str, str | float]]:
        """Return a row per video for a manifest of jobs.prune: id, uri (the path in ``folder``), and the clip's bounds.

        Bounds that are None are left out.
        """
        clip = {"start_s": self.start_s, "end_s": self.end_s}
        fields_with_values = {name: value for name, value in clip.items() if value is not None}
        return [
            {"video_id": name, "uri": str(folder / (self.path or name)), **fields_with_values}
            for name in self.video_ids
        ]


def make_clip_id(path: str, start_s: float | None, end_s: float | None) -> str:
    """Return the id of a clip: the path with a media fragment such as ``#t=1.5,9``, or the path of a whole video."""
    if start_s is None and end_s is None:
        return path
    start, end = ("" if bound is None else repr(bound).removesuffix(".0") for bound in (start_s, end_s))
    return f"{path}#t={start},{end}" if end else f"{path}#t={start}"


@dataclass(frozen=True)
class LoadedQuestions:
    """The questions to ask, in the order of the files, and the faults of the annotations.

    Attributes:
        n_annotated: number of rows. Each row without an item has a fault that is ``left_out``, until ``first`` is used.
    """

    items: tuple[Item, ...]
    faults: tuple[AnnotationFault, ...]
    n_annotated: int

    def summarize_faults(self) -> list[tuple[FaultKind, bool, int, str]]:
        """Return (kind, left out, count, message of the first one) per kind of fault, in order of first appearance."""
        groups: dict[tuple[FaultKind, bool], list[str]] = {}
        for fault in self.faults:
            groups.setdefault((fault.kind, fault.left_out), []).append(fault.message)
        return [(kind, left_out, len(messages), messages[0]) for (kind, left_out), messages in groups.items()]

    def first(self, count: int | None) -> LoadedQuestions:
        """Return only the first ``count`` questions (None: all), with all faults."""
        return self if count is None else replace(self, items=self.items[:count])


class QuestionCollector:
    """Collects a benchmark's questions and faults while its annotations are read row by row."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._faults: list[AnnotationFault] = []
        self._n_annotated = 0
        self._ids: set[str] = set()
        self._first_ids: dict[tuple[object, ...], str] = {}

    def leave_out(self, where: str, question_id: object, fault: NotAskable) -> None:
        """Record a row that cannot be asked; a ``question_id`` other than text or a whole number becomes None."""
        self._n_annotated += 1
        has_id = isinstance(question_id, str | int) and not isinstance(question_id, bool)
        name = str(question_id) if has_id else None
        self._faults.append(AnnotationFault(fault.kind, name, make_printable(f"{where}: {fault}"), True))

    def keep(self, where: str, item: Item) -> None:
        """Record a question and its oddities; one whose id was kept before is left out as "repeated-question"."""
        if item.question_id in self._ids:
            self.leave_out(where, item.question_id, NotAskable("repeated-question", "another row has its id"))
            return
        self._n_annotated += 1
        self._ids.add(item.question_id)
        self.items.append(item)
        for kind, oddity in self._find_oddities(item):
            self._faults.append(AnnotationFault(kind, item.question_id, make_printable(f"{where}: {oddity}"), False))

    def finish(self, place: str, remedy: str) -> LoadedQuestions:
        """Return the collected questions and faults.

        Args:
            place: the file or folder, for errors.
            remedy: the end of the error if no question is left.

        Raises:
            UsageError: no question is left, or more than half of the right answers are not among the options, or they
                seem to be counted from 1.
        """
        self._check_answers(place)
        if self.items:
            return LoadedQuestions(tuple(self.items), tuple(self._faults), self._n_annotated)
        if not self._faults:
            raise UsageError(f"{place}: there is no question in it; {remedy}")
        counts = Counter(fault.kind for fault in self._faults)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        raise UsageError(
            f"{place}: none of the {self._n_annotated} questions can be asked ({kinds}), e.g. "
            f"{self._faults[0].message}; {remedy}"
        )

    def _check_answers(self, place: str) -> None:
        """Raise UsageError if more than half of the right answers are not options, or they seem to be counted from 1.

        Only questions with options and an answer count, and a single one is not checked.
        """
        items = [item for item in self.items if item.options and item.expected is not None]
        wrong = [item for item in items if item.answer is None]
        if len(items) > 1 and len(wrong) > _MAX_WRONG_SHARE * len(items):
            example = wrong[0]
            raise UsageError(
                f"{place}: the right answers of {len(wrong)} of {len(items)} questions are none of their options, "
                f"e.g. {example.expected!r} of {example.question_id} with the options {example.options}: the file has "
                "another layout or version than the benchmark"
            )
        if len(items) > 1 and (reason := explain_count_from_1((item.expected, item.options) for item in items)):
            raise UsageError(f"{place}: {reason}")

    def _find_oddities(self, item: Item) -> Iterator[tuple[FaultKind, str]]:
        """Yield (kind, description) of the faults of a question that can still be asked, and remember the question.

        The faults are: the same text (without options at its end), messages and videos as an earlier question, options
        that are equal without their letters, blank options, and an answer that is not among the options.
        """
        text = item.question
        if item.options:  # MLVU's texts end with the list of options
            text = text.partition(f"\n(A) {item.options[0]}\n")[0]
        key = (item.video_ids, item.conversation, text)
        if (first := self._first_ids.setdefault(key, item.question_id)) != item.question_id:
            yield "repeated-question", f"the same question on the same video as {first!r}"
        counts = Counter(map(strip_option_letter, item.options))
        if repeated_texts := [text for text, count in counts.items() if count > 1]:
            yield "repeated-candidate", f"the option {repeated_texts[0]!r} is there {counts[repeated_texts[0]]} times"
        if blank := sum(not text.strip() for text in item.options):
            yield "blank-candidate", f"{blank} of the {len(item.options)} options are blank"
        if item.options and item.answer is None and item.expected is not None:
            yield "answer-no-candidate", f"the answer {item.expected!r} is none of the options {item.options}"
