"""What a benchmark is: one record, by which its annotations become questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import Any

from pipeline.console import Say
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks.annotations import (
    NO_ANSWER,
    AnnotationRow,
    AnswerRule,
    NotAskable,
    Tables,
    VideoFolder,
    answer_index,
    clip_of,
    data_folder,
    options_of,
    read_annotations,
    read_tables,
    text_of,
)
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions, QuestionCollector, clip_id
from pipeline.evaluate.protocols import ALIASES, QUESTIONS, Protocol
from pipeline.inputs.tables import UNREADABLE, BadRow, UserRow
from pipeline.storage.stores import Store

#: The file of results with the numbers that a benchmark's own code made.
OWN_NUMBERS = "lmms.json"
#: Converts a row of a file to the benchmark's columns; returns None for a row of another benchmark.
Adapt = Callable[[UserRow, AnnotationRow], UserRow | None]


@dataclass(frozen=True)
class Split:
    """A column that groups questions: its title, and its values with their titles in order ({}: any value)."""

    name: str
    title: str
    parts: Mapping[str, str] = field(default_factory=dict)

    def describe_parts(self, present: Collection[object], metric: str) -> str:
        """Describe over how many parts the score is a mean, and the parts without a question; else "".

        Args:
            present: the parts that have questions; without any there is nothing to describe.
            metric: of the protocol: the score is a mean over parts where it names this split.
        """
        missing_parts = [part for part in self.parts if part not in present]
        lacking = f"no question of {', '.join(missing_parts)}" if missing_parts and present else ""
        if metric != self.name or not present:
            return lacking
        of = f" of the {len(self.parts)}" if self.parts else ""
        mean = f"the score is the mean over {len(present)}{of}"
        return f"{lacking}: {mean}, and not the published one" if lacking else f"{mean} {self.title.lower()}s"


@dataclass(frozen=True, kw_only=True)
class OwnScores:
    """Scores by the code of a benchmark, instead of a protocol's rule for single replies.

    Attributes:
        scores: label of an arm -> id of a question -> its score, 0 to 1, for the questions that count; None where a
            method's number is no mean over questions, which then have no scores.
        numbers: the numbers of every arm, JSON-able; written to the results as ``OWN_NUMBERS``.
        notes: lines for the user.
    """

    scores: Mapping[str, Mapping[str, float]] | None
    numbers: Mapping[str, Any]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The description of a benchmark: where its questions and videos are, and the protocols to ask them by.

    Attributes:
        name: on the command line.
        title: in tables.
        protocols: the first is the default.
        source: what the data folder must hold and where that is from, for errors.
        files: globs of the annotations below the data folder; the first that matches anything counts.
        adapt: for layouts that have an option a column, say, or the task in the file's name.
        tables: JSON objects below the data folder that ``adapt`` gets.
        paths: templates, over columns, of a video's path below the data folder; the first that is there counts.
        cut_paths: the same of clips that lie there cut out already; they come after ``paths``.
        question_id, question, options, answer, cluster: columns; ``options`` holds lists of texts.
        n_options: of every question, where another set of questions has another number; 0: any.
        clip: the columns of a clip's start and end in seconds, in the videos of ``paths``.
        answer_rule: what ``answer`` is: a letter, an index counted from 0, or an option's text.
        splits: by which columns scores are told apart; the first one is the main table's.
        n_questions: of a complete data set.
        submission: where to bring the options that replies name, for a benchmark whose right answers are not published:
            there is no column ``answer`` then, and no score.
        weights: of the parts of the split that is the protocol's metric; {}: they weigh the same.
        made_of: what else its scores are made of, by name, for tables.
        notes: sentences about its scores that belong below a table.

    Raises ValueError where a protocol's metric is the mean over a split that is not there.
    """

    name: str
    title: str
    protocols: tuple[Protocol, ...]
    source: str = ""
    files: tuple[str, ...] = ()
    adapt: Adapt | None = None
    tables: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    cut_paths: tuple[str, ...] = ()
    question_id: str = "question_id"
    question: str = "question"
    options: str = "options"
    answer: str = "answer"
    cluster: str = ""
    n_options: int = 0
    clip: tuple[str, str] | None = None
    answer_rule: AnswerRule = "letter"
    splits: tuple[Split, ...] = ()
    n_questions: int | None = None
    submission: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    made_of: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a protocol whose metric is a split that the benchmark does not have."""
        known_names = [QUESTIONS, *(split.name for split in self.splits)]
        if odd := [protocol.metric for protocol in self.protocols if protocol.metric not in known_names]:
            raise ValueError(f"benchmark {self.name}: the metric {odd[0]!r} is none of {', '.join(known_names)}")

    @property
    def scores_questions(self) -> bool:
        """True if every question has a score of its own; False if only a whole method has a number."""
        return not self.submission

    def open(self, model_type: str, data: Path | str | None, say: Say) -> Benchmark:
        """Return the benchmark as a model of this type is asked, with what only its code can tell.

        Args:
            model_type: of the model that will be asked.
            data: of ``load``.
            say: prints a line about work that takes seconds.

        Raises UsageError for a benchmark that cannot be asked.
        """
        return self

    def score_replies(
        self,
        items: Sequence[Item],
        replies: Mapping[str, Mapping[str, str]],
        protocol: Protocol,
    ) -> OwnScores | None:
        """Score the replies by the benchmark's own code. None: the protocol's rule reads each reply by itself.

        Args:
            items: the questions to score.
            replies: label of an arm -> id of a question -> reply; a question that failed has none.
            protocol: that they were asked by.
        """
        return None

    def stored_in(self, store: Store) -> Benchmark:
        """Return the benchmark as the results in a store show it, with what was found out when they were scored."""
        return self

    def arm_share(self, label: str) -> float | None:
        """Return the number of a whole arm as a share, where ``scores_questions`` is False; None: it has none."""
        return None

    def metric(self, stored: str) -> str:
        """Return what the score is a mean over: ``QUESTIONS`` or a split. ``stored`` is what the results say."""
        return stored

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every row needs."""
        answer = () if self.submission else (self.answer,)
        own_columns = (self.question_id, self.question, self.options, *answer, self.cluster)
        return tuple(dict.fromkeys([*own_columns, *self._in_paths, *(split.name for split in self.splits)]))

    def protocol(self, name: str | None = None) -> Protocol:
        """Return the protocol of this name, by default the first. Raise UsageError that lists the known names."""
        protocols = {protocol.name: protocol for protocol in self.protocols}
        protocols |= {alias: protocols[alias_of] for alias, alias_of in ALIASES.items() if alias_of in protocols}
        if name is not None and name not in protocols:
            raise UsageError(f"--protocol {name}: {self.title} has {', '.join(protocols)}")
        return self.protocols[0] if name is None else protocols[name]

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> LoadedQuestions:
        """Return the questions whose videos are below the folder ``data``, and all faults.

        Links in the folder may lead into the ``roots``.

        Raises UsageError that names the file or folder and the remedy: no such folder, or no annotations in it; a file
        that cannot be read or lacks a column. It is raised too if no question is left, or most right answers are not
        among the options.
        """
        remedy = f"the folder must hold {self.source}"
        if data is None:
            raise UsageError(f"--data must name the folder of {self.title}; {remedy}")
        folder = data_folder(data, remedy)
        videos, collector = VideoFolder(folder, roots), QuestionCollector()
        tables = read_tables(folder, self.tables)
        for path in self._files(folder, remedy):
            for place, row in self._rows(folder, path, tables):
                try:
                    item = self._item(row, videos)
                except NotAskable as fault:
                    collector.leave_out(place.where, row.get(self.question_id), fault)
                else:
                    collector.keep(place.where, item)
        return collector.finish(str(folder), remedy)

    @property
    def _in_paths(self) -> list[str]:
        """The columns that the templates of video paths use."""
        templates = (*self.paths, *self.cut_paths)
        return [name for path in templates for _, name, _, _ in Formatter().parse(path) if name]

    def _files(self, folder: Path, remedy: str) -> list[Path]:
        """Return the files in ``folder`` of the first pattern that matches any. Raise UsageError if no pattern does."""
        for pattern in self.files:
            if files := sorted(folder.glob(pattern)):
                return files
        looked_for = ", ".join(self.files)
        raise UsageError(f"{folder}: no annotations of {self.title} in it (looked for {looked_for}); {remedy}")

    def _rows(self, folder: Path, path: Path, tables: Tables) -> list[tuple[AnnotationRow, UserRow]]:
        """Read a file's rows with their places, adapted to the benchmark's columns.

        Rows of another benchmark are left out. Raises UsageError if the file cannot be read, or if no row has a needed
        column.
        """
        try:
            read = read_annotations(folder, path, self.columns, tables)
        except (BadRow, *UNREADABLE) as error:
            raise UsageError(f"{path}: cannot be read: {error}; fetch it again from {self.source}") from error
        adapted_rows = [(place, row if self.adapt is None else self.adapt(row, place)) for place, row in read]
        rows = [(place, row) for place, row in adapted_rows if row is not None]
        present = dict.fromkeys(column for _, row in rows for column in row)
        if rows and (missing_columns := [column for column in self.columns if column not in present]):
            raise UsageError(
                f"{path}: {self.title} needs the columns {', '.join(missing_columns)}, and this file has only "
                f"{', '.join(present)}; take the files of {self.source}"
            )
        return rows

    def _item(self, row: UserRow, videos: VideoFolder) -> Item:
        """Convert an annotation row to a question: ``answer`` is the right option's index, ``expected`` its text.

        ``answer`` is None if the right answer is not among the options. Raises NotAskable for a row that cannot be
        asked.
        """
        options = options_of(row, self.options)
        if self.n_options not in (0, len(options)):
            difference = f"{len(options)} options, and every question of {self.title} has {self.n_options}"
            raise NotAskable("bad-row", f"{difference}: is it another set of questions?")
        expected_answer = None if self.submission else text_of(row, self.answer)
        answer = None if expected_answer is None else answer_index(self.answer_rule, expected_answer, options)
        if answer is None and expected_answer == NO_ANSWER:
            raise NotAskable("no-answer", f"{self.answer} is {expected_answer}: the right answer is not published")
        values = {
            "question_id": text_of(row, self.question_id),
            "question": text_of(row, self.question),
            "cluster": text_of(row, self.cluster),
        }
        splits = {split.name: _part(row, split) for split in self.splits}
        path, (start_s, end_s) = self._video(row, videos)
        return Item(
            **values,
            video_ids=(clip_id(path, start_s, end_s),),
            path=path,
            start_s=start_s,
            end_s=end_s,
            options=options,
            answer=answer,
            expected=expected_answer,
            splits=splits,
        )

    def _video(self, row: UserRow, videos: VideoFolder) -> tuple[str, tuple[float | None, float | None]]:
        """Return the video's path below the data folder, and the bounds of the clip in it. Raise NotAskable.

        The bounds are None for a clip that lies there cut out already.
        """
        names = {name: text_of(row, name) for name in self._in_paths}
        places = [PurePosixPath(path.format_map(names)).as_posix() for path in (*self.paths, *self.cut_paths)]
        bounds = (None, None) if self.clip is None else clip_of(row, self.clip)
        path = videos.find(places, names.values())
        return path, bounds if places.index(path) < len(self.paths) else (None, None)


def _part(row: UserRow, split: Split) -> str:
    """Return a row's part of a split. Raise NotAskable for an unknown part."""
    part = text_of(row, split.name)
    if split.parts and part not in split.parts:
        raise NotAskable("bad-row", f"{split.name} must be one of {', '.join(split.parts)}, got {part!r}")
    return part
