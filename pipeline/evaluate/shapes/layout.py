"""A folder of videos with questions, as VideoMME is published, and what only made-up videos have beside it.

| file | |
|---|---|
| ``data/shapes-SEED.mp4`` | the videos |
| ``videomme/test-00000-of-00001.parquet`` | a row a question, the columns of Video-MME; ``domain`` is the hardness, \
``sub_category`` the kind of the thing that is asked about |
| ``questions.jsonl`` | the same questions for ``jobs.generate --questions`` and as questions of one's own |
| ``manifest.jsonl`` | a row a video for ``jobs.prune``: its seed, frames and hardness |
| ``recipe.json`` | what all of it follows from |
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import UsageError
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.questions import Question, ask
from pipeline.evaluate.shapes.render import render
from pipeline.evaluate.shapes.world import DURATIONS, HARDNESS, SPLIT_NAMES, Hardness, SplitName, Video, benchmark_seeds

Frames = NDArray[np.uint8]
#: A frame a second, all the same: with ``fps`` 1, or as many frames as the video has, each rendered frame is taken.
FPS = 1
#: One thread and no lookahead by the number of CPUs: the same bytes on every run on a machine. No B-frames: the first
#: frame then is at 0 s without an edit list.
ENCODER = {"crf": "18", "preset": "medium", "bf": "0", "threads": "1", "x264-params": "threads=1:lookahead-threads=1"}
_MAX_KEYFRAME_S = 10**6  # the encoder counts frames in 32 bits
_GAP = 4  # pixels between videos of a picture


def write_mp4(target: Path | io.BytesIO, frames: Frames, encoder: Mapping[str, str] = ENCODER) -> None:
    """Write frames [T,H,W,3] (RGB, even sides) as H.264 in yuv420p, at FPS frames a second."""
    with av.open(target, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=FPS, options=dict(encoder))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))


def read_mp4(source: Path | io.BytesIO) -> Frames:
    """Decode a video to frames [T,H,W,3] RGB."""
    with av.open(source) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def write_picture(path: Path, videos: Sequence[Frames], *, columns: int = 8, scale: int = 2) -> None:
    """Write a PNG with the frames [T,H,W,3] of each video in rows of ``columns``, each pixel ``scale`` large.

    All frames have one width.
    """
    sheets = [_sheet(frames, columns) for frames in videos]
    gap = np.full((_GAP, sheets[0].shape[1], 3), 255, np.uint8)
    picture = np.concatenate([part for sheet in sheets for part in (sheet, gap)][:-1])
    picture = np.kron(picture, np.ones((scale, scale, 1), np.uint8))
    with av.open(path, "w", format="image2", options={"update": "1"}) as out:
        stream = out.add_stream("png", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "rgb24"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))


def _sheet(frames: Frames, columns: int) -> Frames:
    """Arrange frames [T,H,W,3] as one picture, ``columns`` in a row; grey lines cover left and top edges."""
    count, height, width = frames.shape[:3]
    rows = -(-count // columns)
    full = np.zeros((rows * columns, height, width, 3), np.uint8)
    full[:count] = frames
    full[:, :, 0] = full[:, 0] = 70  # a line between frames
    by_row = full.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    return by_row.reshape(rows * height, columns * width, 3)


#: Counts up when a seed gives another video or other questions.
WORLD_VERSION = 2
RECIPE = "recipe.json"
ANNOTATIONS = "videomme/test-00000-of-00001.parquet"
_TEXTS = ("video_id", "duration", "domain", "sub_category", "url", "videoID", "question_id", "task_type", "question")
_COLUMNS = pa.schema(
    [*((name, pa.string()) for name in _TEXTS), ("options", pa.list_(pa.string())), ("answer", pa.string())]
)


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """The videos of a benchmark, which take the durations and the kinds of hardness in turn.

    Keyframes are ``keyframe_seconds`` apart; None leaves them to the encoder, which sets one at each change of scene.

    Raises UsageError for names that are not there, or more videos than a seed has.
    """

    split: SplitName = "development"
    seed: int = 0
    n_videos: int = 200
    durations: tuple[str, ...] = tuple(DURATIONS)
    hardness: tuple[str, ...] = ("plain",)
    keyframe_seconds: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown or missing split, duration or hardness, or a number out of range."""
        for option, value, values in (
            ("--split", (self.split,), SPLIT_NAMES),
            ("--durations", self.durations, tuple(DURATIONS)),
            ("--hardness", self.hardness, tuple(HARDNESS)),
        ):
            if odd := [name for name in value if name not in values]:
                raise UsageError(f"{option} {odd[0]}: unknown; known are {', '.join(values)}")
            if not value:
                raise UsageError(f"{option} must name at least one of {', '.join(values)}")
        if not 1 <= (self.keyframe_seconds or 1) <= _MAX_KEYFRAME_S:
            raise UsageError(f"--keyframe-seconds must be 1 to {_MAX_KEYFRAME_S:,}, got {self.keyframe_seconds}")
        benchmark_seeds(self.split, self.seed, self.n_videos)

    @property
    def encoder(self) -> dict[str, str]:
        """The settings of the H.264 encoder."""
        every = self.keyframe_seconds
        return ENCODER if every is None else ENCODER | {"g": str(every * FPS), "sc_threshold": "0"}

    def videos(self) -> Iterator[Film]:
        """Make and yield the videos one after the other.

        The duration changes with each video, and the hardness after each round of durations.
        """
        for number, seed in enumerate(benchmark_seeds(self.split, self.seed, self.n_videos)):
            turn, index = divmod(number, len(self.durations))
            duration, hardness = self.durations[index], HARDNESS[self.hardness[turn % len(self.hardness)]]
            video = make_video(seed, split=self.split, n_frames=DURATIONS[duration], hardness=hardness)
            yield Film(f"{number + 1:03}", duration, self.split, video)

    def as_record(self) -> Row:
        """Return all settings that decide the folder's content, JSON-able."""
        settings: dict[str, Hardness] = {name: HARDNESS[name] for name in self.hardness}
        record = asdict(self) | {"hardness": {name: asdict(hardness) for name, hardness in settings.items()}}
        del record["keyframe_seconds"]  # the encoder's settings have it, and folders of older recipes stay theirs
        record = {"world_version": WORLD_VERSION, "fps": FPS, "encoder": self.encoder, **record}
        return dict(json.loads(json.dumps(record)))


@dataclass(frozen=True)
class Film:
    """A video of the benchmark with the number that VideoMME's layout calls video_id."""

    number: str
    duration: str
    split: SplitName
    video: Video

    @property
    def key(self) -> str:
        """The name of the video's file without its suffix."""
        return f"shapes-{self.video.seed}"

    @property
    def path(self) -> str:
        """The path below the folder, which is also the video's id in jobs.prune."""
        return f"data/{self.key}.mp4"

    def questions(self) -> list[tuple[str, Question]]:
        """Return (question id, question) of the video's questions."""
        return [(f"{self.number}-{i}", question) for i, question in enumerate(ask(self.video), 1)]


#: A row of a file, or a recipe, as JSON has it.
Row = dict[str, str | int | list[str]]


def write_benchmark(folder: Path, recipe: CorpusRecipe, progress: Callable[[int], None] = lambda n_done: None) -> int:
    """Render the videos and write all files of a benchmark; return the number of questions.

    A folder of the same recipe is written again, so that an unfinished folder becomes whole. Raises UsageError if the
    folder holds something else.

    Args:
        progress: gets the number of videos that are done, after each video.
    """
    _claim(folder, recipe.as_record())
    films = []
    for film in recipe.videos():
        write_mp4(folder / film.path, render(film.video), recipe.encoder)
        films.append(film)
        progress(len(films))
    questions = [(film, question_id, question) for film in films for question_id, question in film.questions()]
    _write_lines(folder / "manifest.jsonl", [_manifest_row(film) for film in films])
    _write_lines(folder / "questions.jsonl", [_own_row(*question_row) for question_row in questions])
    # The annotations are written last: until then evaluate refuses the folder.
    table = pa.Table.from_pylist([_videomme_row(*question_row) for question_row in questions], schema=_COLUMNS)
    pq.write_table(table, folder / ANNOTATIONS)
    return len(questions)


def _claim(folder: Path, record: Row) -> None:
    """Make the folder, write its recipe, and delete its annotations, which are written last.

    Raises UsageError if the folder holds videos of another recipe, or anything else.
    """
    path = folder / RECIPE
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder")
    if path.is_file():
        try:
            recipe = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            recipe = None
        if recipe != record:
            raise UsageError(f"{folder} holds videos of another recipe (see {RECIPE} in it): name another folder")
    elif folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds something else (it has no {RECIPE}): name an empty folder or a new one")
    for part in (folder / "data", (folder / ANNOTATIONS).parent):
        part.mkdir(parents=True, exist_ok=True)
    (folder / ANNOTATIONS).unlink(missing_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _write_lines(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _videomme_row(film: Film, question_id: str, question: Question) -> Row:
    """Return a question as a row in VideoMME's columns."""
    return {
        "video_id": film.number,
        "duration": film.duration,
        "domain": film.video.hardness.name,
        "sub_category": question.kind,
        "url": "",
        "videoID": film.key,
        "question_id": question_id,
        "task_type": question.type,
        "question": question.prompt,
        "options": [f"{letter}. {text}" for letter, text in zip("ABCD", question.choices, strict=True)],
        "answer": "ABCD"[question.answer],
    }


def _own_row(film: Film, question_id: str, question: Question) -> Row:
    """Return a question as a row of a question file for jobs.generate."""
    return {
        "question_id": question_id,
        "video_id": film.path,
        "prompt": question.prompt,
        "choices": list(question.choices),
        "answer": question.right,
        "split": question.type,
        "duration": film.duration,
        "hardness": film.video.hardness.name,
        "kind": question.kind,
    }


def _manifest_row(film: Film) -> Row:
    """Return a video as a row of a manifest for jobs.prune."""
    return {
        "video_id": film.path,
        "uri": film.path,
        "seed": film.video.seed,
        "seeds": film.split,
        "n_frames": film.video.n_frames,
        "duration": film.duration,
        "hardness": film.video.hardness.name,
    }
