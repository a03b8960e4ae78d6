"""Writes a benchmark folder of synthetic videos with questions, in the layout of VideoMME with further files.

| file | content |
|---|---|
| ``data/shapes-SEED.mp4`` | the videos |
| ``videomme/test-00000-of-00001.parquet`` | a row per question in the columns of Video-MME |
| ``questions.jsonl`` | the same questions for ``jobs.generate --questions`` and ``--benchmark FILE`` |
| ``manifest.jsonl`` | a row per video for ``jobs.prune``, with seed, frames and hardness |
| ``recipe.json`` | the settings from which the content follows |
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
from pipeline.evaluate.shapes.world import (
    DURATIONS,
    HARDNESS,
    SPLIT_NAMES,
    Hardness,
    SplitName,
    Video,
    compute_benchmark_seeds,
)

Frames = NDArray[np.uint8]
#: Frames per second of the videos. Sampling at ``fps`` 1, or as many frames as a video has, takes each frame once.
FPS = 1
#: One thread and no macroblock tree, which in x264 reads memory before it is set, give the same bytes on every run on a
#: machine. Without B-frames, the first frame is at 0 s without an edit list.
ENCODER = {
    **{"crf": "18", "preset": "medium", "bf": "0", "threads": "1"},
    "x264-params": "threads=1:lookahead-threads=1:mbtree=0",
}
_MAX_KEYFRAME_S = 10**6  # the encoder counts frames in 32 bits
_GAP = 4  # pixels between the videos of a picture


def write_mp4(target: Path | io.BytesIO, frames: Frames, encoder: Mapping[str, str] = ENCODER) -> None:
    """Write frames [T, H, W, 3] (RGB, even height and width) as H.264 video in yuv420p, at FPS frames per second."""
    with av.open(target, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=FPS, options=dict(encoder))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            out.mux(stream.encode(picture.reformat(format="yuv420p", threads=1)))
        out.mux(stream.encode(None))


def read_mp4(source: Path | io.BytesIO) -> Frames:
    """Decode all frames of a video, as RGB [T, H, W, 3]."""
    with av.open(source) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def write_picture(path: Path, videos: Sequence[Frames], *, columns: int = 8, scale: int = 2) -> None:
    """Write a PNG contact sheet of several videos below each other, with a white gap between them.

    Args:
        videos: frames [T, H, W, 3] of each video, at least one video; all with the same width.
        columns: frames per row.
        scale: side of the square that each pixel becomes.
    """
    sheets = [_make_contact_sheet(frames, columns) for frames in videos]
    gap = np.full((_GAP, sheets[0].shape[1], 3), 255, np.uint8)
    picture = np.concatenate([part for sheet in sheets for part in (sheet, gap)][:-1])
    picture = np.kron(picture, np.ones((scale, scale, 1), np.uint8))
    with av.open(path, "w", format="image2", options={"update": "1"}) as out:
        stream = out.add_stream("png", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "rgb24"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))


def _make_contact_sheet(frames: Frames, columns: int) -> Frames:
    """Arrange frames [T, H, W, 3] in rows of ``columns`` as one picture; the last row is filled up with black.

    A gray line replaces the top row and the left column of pixels of each cell.
    """
    count, height, width = frames.shape[:3]
    rows = -(-count // columns)
    full = np.zeros((rows * columns, height, width, 3), np.uint8)
    full[:count] = frames
    full[:, :, 0] = full[:, 0] = 70  # a line between frames
    by_row = full.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    return by_row.reshape(rows * height, columns * width, 3)


#: Increased when seeds give other videos or questions than before.
WORLD_VERSION = 2
RECIPE = "recipe.json"
ANNOTATIONS = "videomme/test-00000-of-00001.parquet"
_TEXTS = ("video_id", "duration", "domain", "sub_category", "url", "videoID", "question_id", "task_type", "question")
_COLUMNS = pa.schema(
    [*((name, pa.string()) for name in _TEXTS), ("options", pa.list_(pa.string())), ("answer", pa.string())]
)


@dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """The settings of a benchmark, from which all of its videos and questions follow.

    Attributes:
        seed: the number of the benchmark in its split; benchmarks of other seeds have other videos.
        durations: names from DURATIONS that the videos take in turn.
        hardness: names from HARDNESS; each round of durations takes the next one.
        keyframe_seconds: None lets the encoder set keyframes at changes of scene.
    """

    split: SplitName = "development"
    seed: int = 0
    n_videos: int = 200
    durations: tuple[str, ...] = tuple(DURATIONS)
    hardness: tuple[str, ...] = ("plain",)
    keyframe_seconds: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown or missing split, duration or hardness, or for a number out of range."""
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
        compute_benchmark_seeds(self.split, self.seed, self.n_videos)

    @property
    def encoder(self) -> dict[str, str]:
        """The options of the H.264 encoder."""
        every = self.keyframe_seconds
        return ENCODER if every is None else ENCODER | {"g": str(every * FPS), "sc_threshold": "0"}

    def videos(self) -> Iterator[Film]:
        """Yield the videos in the order of their seeds, numbered from "001"; each is made when it is requested."""
        for number, seed in enumerate(compute_benchmark_seeds(self.split, self.seed, self.n_videos)):
            turn, index = divmod(number, len(self.durations))
            duration = self.durations[index]
            hardness = HARDNESS[self.hardness[turn % len(self.hardness)]]
            video = make_video(seed, split=self.split, n_frames=DURATIONS[duration], hardness=hardness)
            yield Film(f"{number + 1:03}", duration, self.split, video)

    def as_record(self) -> Row:
        """Return all settings that determine the folder's content as JSON values; each hardness is an object."""
        settings: dict[str, Hardness] = {name: HARDNESS[name] for name in self.hardness}
        record = asdict(self) | {"hardness": {name: asdict(hardness) for name, hardness in settings.items()}}
        del record["keyframe_seconds"]  # part of the encoder options; older recipes, which lack it, stay equal
        record = {"world_version": WORLD_VERSION, "fps": FPS, "encoder": self.encoder, **record}
        return dict(json.loads(json.dumps(record)))


@dataclass(frozen=True)
class Film:
    """A video of the benchmark, with what the rows of the folder's files say about it.

    Attributes:
        number: what VideoMME calls ``video_id``.
    """

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
        """The path of the video's file in the benchmark folder, which is also its id in jobs.prune."""
        return f"data/{self.key}.mp4"

    def questions(self) -> list[tuple[str, Question]]:
        """Return (question id, question) for each of the video's questions; ids are NUMBER-1, NUMBER-2 and so on."""
        return [(f"{self.number}-{i}", question) for i, question in enumerate(ask(self.video), 1)]


#: A row of a file, or a recipe, as JSON has it.
Row = dict[str, str | int | list[str]]


def write_benchmark(folder: Path, recipe: CorpusRecipe, progress: Callable[[int], None] = lambda n_done: None) -> int:
    """Render all videos of a benchmark, write its files, and return the number of questions.

    A folder with the same recipe is written again from the first video. The annotations are deleted first and written
    last, so an unfinished folder has none.

    Args:
        progress: called after each video with the number of finished videos.

    Raises:
        UsageError: the folder is a file, or holds another recipe or other files.
    """
    _claim(folder, recipe.as_record())
    films = []
    for film in recipe.videos():
        write_mp4(folder / film.path, render(film.video), recipe.encoder)
        films.append(film)
        progress(len(films))
    questions = [(film, question_id, question) for film in films for question_id, question in film.questions()]
    _write_lines(folder / "manifest.jsonl", [_make_manifest_line(film) for film in films])
    _write_lines(folder / "questions.jsonl", [_make_question_line(*question_row) for question_row in questions])
    # The annotations are written last: until then, jobs.evaluate refuses the folder.
    table = pa.Table.from_pylist([_make_videomme_row(*question_row) for question_row in questions], schema=_COLUMNS)
    pq.write_table(table, folder / ANNOTATIONS)
    return len(questions)


def _claim(folder: Path, record: Row) -> None:
    """Create the folder and its subfolders, write its recipe, and delete its annotations.

    Raises:
        UsageError: the path is a file, the folder has another or a damaged recipe, or it has files and no recipe.
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
    """Write rows as a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _make_videomme_row(film: Film, question_id: str, question: Question) -> Row:
    """Return a question as a row in VideoMME's columns; the domain is the hardness, the sub-category the kind."""
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


def _make_question_line(film: Film, question_id: str, question: Question) -> Row:
    """Return a question as a row of ``questions.jsonl``: choices without letters, and the right answer as text."""
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


def _make_manifest_line(film: Film) -> Row:
    """Return a video as a manifest row: its path as id and uri, with seed, split, length and hardness."""
    return {
        "video_id": film.path,
        "uri": film.path,
        "seed": film.video.seed,
        "seeds": film.split,
        "n_frames": film.video.n_frames,
        "duration": film.duration,
        "hardness": film.video.hardness.name,
    }
