"""Defines what a benchmark is, and how its annotations become questions."""

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
    find_answer_index,
    get_clip,
    get_options,
    get_text,
    read_annotations,
    read_tables,
    resolve_data_folder,
)
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions, QuestionCollector, make_clip_id
from pipeline.evaluate.protocols import ALIASES, QUESTIONS, Protocol
from pipeline.inputs.tables import UNREADABLE, BadRow, UserRow
from pipeline.storage.stores import Store

#: The file in results that has the numbers made by a benchmark's own code.
OWN_NUMBERS = "lmms.json"
#: Converts a row of a file to the benchmark's columns; returns None for a row that belongs to another benchmark.
Adapt = Callable[[UserRow, AnnotationRow], UserRow | None]


@dataclass(frozen=True)
class Split:
    """A column that groups questions into parts.

    Attributes:
        title: its title in tables.
        parts: value -> title, in the order of tables; {} allows any value.
    """

    name: str
    title: str
    parts: Mapping[str, str] = field(default_factory=dict)

    def describe_values(self, present: Collection[object], metric: str) -> str:
        """Describe the parts without a question, and over how many parts the score is a mean; "" if neither applies.

        Args:
            present: the parts that have questions; if it is empty, the result is "".
            metric: the split over whose parts the score is a mean, or "questions".
        """
        missing_parts = [part for part in self.parts if part not in present]
        lacking = f"no question of {', '.join(missing_parts)}" if missing_parts and present else ""
        if metric != self.name or not present:
            return lacking
        of = f" of the {len(self.parts)}" if self.parts else ""
        mean = f"the score is the mean over {len(present)}{of}"
        return f"{lacking}: {mean}, and not the published one" if lacking else f"{mean} {self.title.lower()}s"


@dataclass(frozen=True, kw_only=True)
class BenchmarkScores:
    """Scores made by a benchmark's own code, instead of a protocol's rule for single replies.

    Attributes:
        scores: label of an arm -> question id -> score in [0, 1], for the questions that count; None if the number of
            an arm is not a mean over questions.
        numbers: JSON values with the numbers of every arm, written to the results as ``OWN_NUMBERS``.
    """

    scores: Mapping[str, Mapping[str, float]] | None
    numbers: Mapping[str, Any]
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The description of a benchmark: where its questions and videos are, and the protocols by which they are asked.

    Attributes:
        protocols: the first is the default.
        source: what the data folder must hold and where to get it, for errors.
        files: glob patterns of annotation files in the data folder; the first pattern that matches any file is used.
        adapt: converts rows of other layouts, or returns None to leave out a row; None: all rows stay as they are.
        tables: JSON files in the data folder whose objects ``adapt`` gets.
        paths: templates of a video's path in the data folder, with columns in braces; the first existing path is used.
        cut_paths: the same for clips that are already cut into files of their own; tried after ``paths``.
        question_id, question, options, answer, cluster: names of columns; ``options`` holds lists of texts.
        n_options: number of options of every question; 0: any.
        clip: columns with the start and end of a clip in seconds, for videos of ``paths``; None: whole videos.
        splits: the columns by which scores are broken down; the first one is in the main table.
        n_questions: number of questions of the complete data set; None: unknown.
        submission: where to send the chosen options, for a benchmark without published answers; it has no column
            ``answer`` and no scores. "" for others.
        weights: weights of the parts of the split that is the metric; {}: equal weights.
        made_of: further facts about its scores, name -> text, for tables.
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
        """Raise ValueError if the metric of a protocol is neither "questions" nor one of the splits."""
        known_names = [QUESTIONS, *(split.name for split in self.splits)]
        if odd := [protocol.metric for protocol in self.protocols if protocol.metric not in known_names]:
            raise ValueError(f"benchmark {self.name}: the metric {odd[0]!r} is none of {', '.join(known_names)}")

    @property
    def scores_questions(self) -> bool:
        """True unless only whole arms have numbers, or there are no scores."""
        return not self.submission

    def open(self, model_type: str, data: Path | str | None, say: Say) -> Benchmark:
        """Return the benchmark prepared for a model type; by default itself.

        Args:
            say: prints a line before work that takes seconds.

        Raises:
            UsageError: the benchmark cannot be asked.
        """
        return self

    def score_replies(
        self,
        items: Sequence[Item],
        replies: Mapping[str, Mapping[str, str]],
        protocol: Protocol,
    ) -> BenchmarkScores | None:
        """Score the replies (by arm label and question id, without failed questions) by own code; by default None."""
        return None

    def load_stored_settings(self, store: Store) -> Benchmark:
        """Return the benchmark with what the results in a store say about its scores; by default itself."""
        return self

    def get_arm_share(self, label: str) -> float | None:
        """Return the number of a whole arm in [0, 1], for benchmarks without scores of questions; by default None."""
        return None

    def metric(self, stored: str) -> str:
        """Return what the score is a mean over, ``QUESTIONS`` or a split; by default ``stored``, as the results say."""
        return stored

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that annotations must have after ``adapt``."""
        answer = () if self.submission else (self.answer,)
        own_columns = (self.question_id, self.question, self.options, *answer, self.cluster)
        return tuple(dict.fromkeys([*own_columns, *self._in_paths, *(split.name for split in self.splits)]))

    def protocol(self, name: str | None = None) -> Protocol:
        """Return the protocol with this name or alias, None for the first; raise UsageError if there is none."""
        protocols = {protocol.name: protocol for protocol in self.protocols}
        protocols |= {alias: protocols[alias_of] for alias, alias_of in ALIASES.items() if alias_of in protocols}
        if name is not None and name not in protocols:
            raise UsageError(f"--protocol {name}: {self.title} has {', '.join(protocols)}")
        return self.protocols[0] if name is None else protocols[name]

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> LoadedQuestions:
        """Read the annotations, and return the questions whose videos are in the data folder, and all faults.

        Args:
            roots: further folders into which links in the data folder may lead.

        Raises:
            UsageError: ``data`` is None or not a folder, it has no annotations, a file cannot be read or lacks a
                column, no question is left, or more than half of the right answers are not among the options, or they
                seem to be counted from 1.
        """
        remedy = f"the folder must hold {self.source}"
        if data is None:
            raise UsageError(f"--data must name the folder of {self.title}; {remedy}")
        folder = resolve_data_folder(data, remedy)
        videos = VideoFolder(folder, roots)
        collector = QuestionCollector()
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
        """The columns in the templates of video paths, with repetitions."""
        templates = (*self.paths, *self.cut_paths)
        return [name for path in templates for _, name, _, _ in Formatter().parse(path) if name]

    def _files(self, folder: Path, remedy: str) -> list[Path]:
        """Return the sorted files that match the first pattern with any match; raise UsageError if none matches."""
        for pattern in self.files:
            if files := sorted(folder.glob(pattern)):
                return files
        looked_for = ", ".join(self.files)
        raise UsageError(f"{folder}: no annotations of {self.title} in it (looked for {looked_for}); {remedy}")

    def _rows(self, folder: Path, path: Path, tables: Tables) -> list[tuple[AnnotationRow, UserRow]]:
        """Read the rows of a file with their positions, and adapt them; rows that become None are left out.

        Raises:
            UsageError: the file cannot be read, or a needed column is in none of its rows.
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
        """Convert an adapted row to a question; its ``answer`` is None if the right answer is not among the options.

        Benchmarks with a ``submission`` have neither ``answer`` nor ``expected``.

        Raises:
            NotAskable: a cell is invalid, the number of options or a part is wrong, the answer is -1 (not published)
                and denotes no option, or the video is missing or must not be read.
        """
        options = get_options(row, self.options)
        if self.n_options not in (0, len(options)):
            difference = f"{len(options)} options, and every question of {self.title} has {self.n_options}"
            raise NotAskable("bad-row", f"{difference}: is it another set of questions?")
        expected_answer = None if self.submission else get_text(row, self.answer)
        answer = None if expected_answer is None else find_answer_index(self.answer_rule, expected_answer, options)
        if answer is None and expected_answer == NO_ANSWER:
            raise NotAskable("no-answer", f"{self.answer} is {expected_answer}: the right answer is not published")
        values = {
            "question_id": get_text(row, self.question_id),
            "question": get_text(row, self.question),
            "cluster": get_text(row, self.cluster),
        }
        splits = {split.name: _get_split_value(row, split) for split in self.splits}
        path, (start_s, end_s) = self._video(row, videos)
        return Item(
            **values,
            video_ids=(make_clip_id(path, start_s, end_s),),
            path=path,
            start_s=start_s,
            end_s=end_s,
            options=options,
            answer=answer,
            expected=expected_answer,
            splits=splits,
        )

    def _video(self, row: UserRow, videos: VideoFolder) -> tuple[str, tuple[float | None, float | None]]:
        """Return the video's path relative to the data folder, and the clip's (start, end) in seconds.

        The bounds are None where the clip is open, and for clips that are already cut.
        """
        names = {name: get_text(row, name) for name in self._in_paths}
        places = [PurePosixPath(path.format_map(names)).as_posix() for path in (*self.paths, *self.cut_paths)]
        bounds = (None, None) if self.clip is None else get_clip(row, self.clip)
        path = videos.find(places, names.values())
        return path, bounds if places.index(path) < len(self.paths) else (None, None)


def _get_split_value(row: UserRow, split: Split) -> str:
    """Return the part of a split that a row belongs to; raise NotAskable if the split has no such part."""
    part = get_text(row, split.name)
    if split.parts and part not in split.parts:
        raise NotAskable("bad-row", f"{split.name} must be one of {', '.join(split.parts)}, got {part!r}")
    return part
