"""Decoders that have taken over their process and send their own messages to its parent.

Each sends the honest message of the video, in which one thing is wrong: without the check of that, it would be taken.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.video import child_messages
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from pipeline.video.shared_frames import create_memory
from tests.builders.clips import BadReader, KeepSize

SECONDS = 600
NEW = [1, True, []]


class Evil:
    """Unpickled, it leaves a file named evil beside the video."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._path).with_name("evil"),)


def pipe_to_parent() -> Connection:
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("pipe"), Connection):
        assert frame.f_back is not None
        frame = frame.f_back
    pipe: Connection = frame.f_locals["pipe"]
    return pipe


class Forger:
    """A child's end of the pipe, and what it may send: an honest message of the video with other values in it."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.pipe = pipe_to_parent()
        video = decode_video(DecodeRequest(path, Sampling(2), KeepSize(), decoder="pyav"))
        self.fields: dict[str, Any] = {name: video.record.get(name) for name in child_messages._COLUMNS}
        self.fields["backend"] = f"{__name__}:{name}"
        self.arrays = video.frame_indices.tobytes() + video.timestamps.tobytes()
        self.shape = list(video.frames.shape)

    def raw(self, data: bytes) -> None:
        os.write(self.pipe.fileno(), data)

    def text(self, text: str) -> None:
        self.pipe.send_bytes(text.encode())

    def video(
        self,
        shape: list[int] | None = None,
        handover: object = NEW,
        arrays: bytes | None = None,
        memory: Callable[[int], int] | None = create_memory,
        cpu_s: object = 0.1,
        **fields: object,
    ) -> None:
        """Send the message of the video, then the descriptor of ``memory`` for as many bytes as its frames have."""
        shape = shape or self.shape
        message = {"video": self.fields | fields, "shape": shape, "handover": handover, "cpu_s": cpu_s}
        text = json.dumps(message, default=lambda value: value.item())
        self.pipe.send_bytes(f"{text}\n".encode() + (self.arrays if arrays is None else arrays))
        if memory is not None:
            reduction.send_handle(self.pipe, memory(math.prod(shape)), os.getppid())


def make_shrinking_memory(size: int) -> int:
    descriptor = os.memfd_create("frames", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def make_file(size: int) -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())


def flood(forger: Forger) -> None:
    """Name the decoder without end, many times a write: each time the parent looks, another message is there."""
    message = json.dumps({"text": forger.fields["backend"]}).encode()
    while True:
        forger.raw(1000 * (struct.pack("!i", len(message)) + message))


class Attack(NamedTuple):
    """A message, and the reason for which the parent refuses it: no other check may hide that its own is missing."""

    reason: str
    send: Callable[[Forger], object]


LATE = "not decoded within 1 s"
NO_FRAMES = "no frames came with it: "
ATTACKS = {
    "Pickle": Attack("UnicodeDecodeError", lambda f: f.pipe.send(Evil(f.path))),
    "PickleOfATuple": Attack("UnicodeDecodeError", lambda f: f.pipe.send((Evil(f.path), Evil(f.path)))),
    "PickleForArrays": Attack("its arrays have", lambda f: f.video(arrays=pickle.dumps(Evil(f.path)))),
    "NoText": Attack("UnicodeDecodeError", lambda f: f.pipe.send_bytes(b'{"text": "\xff"}')),
    "NoJson": Attack("JSONDecodeError", lambda f: f.text("{")),
    "Deep": Attack("RecursionError", lambda f: f.text("[" * 60_000)),
    "Long": Attack("its length is 1073741824, not 0", lambda f: f.raw(struct.pack("!i", 2**30))),
    "VeryLong": Attack("its length is -1, not 0", lambda f: f.raw(struct.pack("!iQ", -1, 2**40))),
    "LongText": Attack("its text has", lambda f: f.text(json.dumps({"text": f.fields["backend"], "x": "x" * 2**17}))),
    "Unknown": Attack("its kind is unknown", lambda f: f.text('{"code": "import os"}')),
    "NoFault": Attack("its kind is unknown", lambda f: f.text('{"fault": ["nonsense", "x", null]}')),
    "OtherDecoder": Attack(
        "it names another decoder", lambda f: f.text('{"fault": ["corrupt", "x", "antigravity:fly"]}')
    ),
    "OtherDecoderOfText": Attack("it names another decoder", lambda f: f.text('{"text": "antigravity:fly"}')),
    "OtherDecoderOfVideo": Attack("it names another decoder", lambda f: f.video(backend="antigravity:fly")),
    "TextForNumber": Attack("fps has a wrong value", lambda f: f.video(fps="25")),
    "NumberForText": Attack("codec has a wrong value", lambda f: f.video(codec=7)),
    "NullForNumber": Attack("source_size has a wrong value", lambda f: f.video(source_size=None)),
    "NullForDecoder": Attack("backend has a wrong value", lambda f: f.video(backend=None)),
    "NotANumber": Attack("duration_s has a wrong value", lambda f: f.video(duration_s=float("nan"))),
    "TooLargeForItsColumn": Attack("source_width has a wrong value", lambda f: f.video(source_width=2**31)),
    "FieldTooMany": Attack("its columns are not those of a video", lambda f: f.video(more=1)),
    "FieldMissing": Attack("its columns are not those of a video", lambda f: (f.fields.pop("codec"), f.video())),
    "NoShape": Attack("the shape of its frames is invalid", lambda f: f.video(shape=[2, 64, 96, 4])),
    "ShortShape": Attack("the shape of its frames is invalid", lambda f: f.video(shape=[2, 64, 96])),
    "LongShape": Attack("the shape of its frames is invalid", lambda f: f.video(shape=[2, 64, 96, 3, 1])),
    "NoFrames": Attack("the shape of its frames is invalid", lambda f: f.video(shape=[0, 64, 96, 3], arrays=b"")),
    "ManyFrames": Attack(
        "the shape of its frames is invalid",
        lambda f: f.video(shape=[2**22 + 1, 1, 1, 3], arrays=bytes(16 * (2**22 + 1))),
    ),
    "ManyPixels": Attack(  # no process here can make so much memory
        "its frames have 25769803776 bytes, more", lambda f: f.video(shape=[2, 2**16, 2**16, 3], memory=None)
    ),
    "UnorderedFrames": Attack("not numbered in order", lambda f: f.video(arrays=struct.pack("<qqdd", 1, 0, 0, 0))),
    "NegativeFrame": Attack("not numbered in order", lambda f: f.video(arrays=struct.pack("<qqdd", -1, 0, 0, 0))),
    "NoTimes": Attack(
        "not numbered in order, or have no times",
        lambda f: f.video(arrays=struct.pack("<qqdd", 0, 1, 0, float("inf"))),
    ),
    "NoArrays": Attack("its arrays have 0 bytes", lambda f: f.video(arrays=b"")),
    "NegativeSeconds": Attack("its CPU seconds are not a number of 0", lambda f: f.video(cpu_s=-0.1)),
    "EndlessSeconds": Attack("its CPU seconds are not a number of 0", lambda f: f.video(cpu_s=float("inf"))),
    "TextForSeconds": Attack("its kind is unknown", lambda f: f.video(cpu_s="0.1")),
    "NoHandover": Attack("it does not say which memory", lambda f: f.video(handover=[1, 1, []])),
    "NegativeMemory": Attack("it does not say which memory", lambda f: f.video(handover=[-1, True, []])),
    "NegativeMemoryDropped": Attack("it does not say which memory", lambda f: f.video(handover=[1, True, [-1]])),
    "UnknownMemory": Attack(f"{NO_FRAMES}.* less than", lambda f: f.video(handover=[99, False, []], memory=None)),
    "NoDescriptor": Attack(f"{NO_FRAMES}received 0 items", lambda f: (f.video(memory=None), f.raw(b"x"))),
    "MemoryThatShrinks": Attack(f"{NO_FRAMES}.* may shrink", lambda f: f.video(memory=make_shrinking_memory)),
    "FileForMemory": Attack(NO_FRAMES, lambda f: f.video(memory=make_file)),
    "SmallMemory": Attack(f"{NO_FRAMES}.* less than", lambda f: f.video(memory=lambda size: create_memory(size - 1))),
    "LargeMemory": Attack(f"{NO_FRAMES}.* more than", lambda f: f.video(memory=lambda size: create_memory(size + 1))),
    "NoDescriptorAtAll": Attack(LATE, lambda f: f.video(memory=None)),
    "HalfALength": Attack(LATE, lambda f: f.raw(b"\0\0")),
    "HalfAMessage": Attack(LATE, lambda f: f.raw(struct.pack("!i", 100) + b"{")),
    "Flood": Attack(LATE, flood),
}
MESSAGES: dict[str, Callable[[Forger], object]] = {
    "Honest": Forger.video,  # what the attacks change, to see that it is taken
    **{name: attack.send for name, attack in ATTACKS.items()},
}


class Forging(BadReader):
    """Sends its message as soon as frames are asked for, and waits for what becomes of it."""

    def read(self, indices: Any) -> Any:
        name = type(self).__name__
        MESSAGES[name](Forger(self.index.path, name))
        time.sleep(SECONDS)


globals().update({name: type(name, (Forging,), {"__module__": __name__}) for name in MESSAGES})
