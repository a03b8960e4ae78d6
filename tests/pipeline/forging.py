"""Decoders that have taken over their process and send their own messages to its parent. Each name is a message."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.video import child_messages
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from pipeline.video.shared_frames import Handover, SharedFrames, create_memory
from tests.pipeline.videos import BadReader, KeepSize

SECONDS = 600
OK = [0, False, []]


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
        self.fields: dict[str, Any] = {name: video.record.get(name) for name in child_messages._FIELDS}
        self.fields["backend"] = f"{__name__}:{name}"
        self.arrays = video.frame_indices.tobytes() + video.timestamps.tobytes()
        self.shape = list(video.frames.shape)

    def raw(self, data: bytes) -> None:
        os.write(self.pipe.fileno(), data)

    def text(self, text: str) -> None:
        self.pipe.send_bytes(text.encode())

    def video(
        self,
        shape: object = None,
        handover: object = OK,
        arrays: bytes | None = None,
        descriptor: int | None = None,
        **fields: object,
    ) -> None:
        message = {"video": self.fields | fields, "shape": shape or self.shape, "handover": handover}
        text = json.dumps(message, default=lambda value: value.item())
        self.pipe.send_bytes(f"{text}\n".encode() + (self.arrays if arrays is None else arrays))
        if descriptor is not None:
            reduction.send_handle(self.pipe, descriptor, os.getppid())


NEW = [1, True, []]


def in_memory(size: int) -> int:
    descriptor = os.memfd_create("frames", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def honest(forger: Forger) -> None:
    """What all others change, to see that it is taken."""
    shared = SharedFrames()
    shared.allocate(tuple(forger.shape))
    _, descriptor = shared.hand_over()
    forger.video(handover=Handover(1, True, ()), descriptor=descriptor)


ATTACKS: dict[str, Callable[[Forger], object]] = {
    "Honest": honest,
    "Pickle": lambda f: f.pipe.send(Evil(f.path)),
    "PickleOfATuple": lambda f: f.pipe.send((Evil(f.path), Evil(f.path))),
    "PickleForArrays": lambda f: f.video(arrays=pickle.dumps(Evil(f.path))),
    "NoText": lambda f: f.pipe.send_bytes(b"\xff\xfe"),
    "NoJson": lambda f: f.text("{"),
    "Deep": lambda f: f.text("[" * 60_000),
    "Long": lambda f: f.raw(struct.pack("!i", 2**30)),
    "VeryLong": lambda f: f.raw(struct.pack("!iQ", -1, 2**40)),
    "Unknown": lambda f: f.text('{"code": "import os"}'),
    "NoFault": lambda f: f.text('{"fault": ["nonsense", "x", null]}'),
    "OtherDecoder": lambda f: f.text('{"fault": ["corrupt", "x", "antigravity:fly"]}'),
    "OtherDecoderOfText": lambda f: f.text('{"text": "antigravity:fly"}'),
    "OtherDecoderOfVideo": lambda f: f.video(backend="antigravity:fly"),
    "TextForNumber": lambda f: f.video(fps="25"),
    "NumberForText": lambda f: f.video(codec=7),
    "NotANumber": lambda f: f.video(duration_s=float("nan")),
    "TooLargeForItsColumn": lambda f: f.video(source_width=2**31),
    "FieldTooMany": lambda f: f.video(more=1),
    "NoShape": lambda f: f.video(shape=[2, 64, 96, 4]),
    "ManyFrames": lambda f: f.video(shape=[2**22 + 1, 1, 1, 3]),
    "ManyPixels": lambda f: f.video(shape=[2, 2**16, 2**16, 3]),
    "NoFrames": lambda f: f.video(shape=[0, 64, 96, 3], arrays=b""),
    "UnorderedFrames": lambda f: f.video(arrays=struct.pack("<qqdd", 1, 0, 0, 0)),
    "NoTimes": lambda f: f.video(arrays=struct.pack("<qqdd", 0, 1, 0, float("inf"))),
    "UnknownMemory": lambda f: f.video(handover=[99, False, []]),
    "NoHandover": lambda f: f.video(handover=[1, 1, []]),
    "NoDescriptor": lambda f: (f.video(handover=NEW), f.raw(b"x")),
    "MemoryThatShrinks": lambda f: f.video(handover=NEW, descriptor=in_memory(2 * 64 * 96 * 3)),
    "SmallMemory": lambda f: f.video(handover=NEW, descriptor=create_memory(100)),
    "LargeMemory": lambda f: f.video(handover=NEW, descriptor=create_memory(2**30)),
    "NoMemory": lambda f: f.video(handover=NEW, descriptor=os.open("/dev/zero", os.O_RDWR)),
    "HalfALength": lambda f: f.raw(b"\0\0"),
    "HalfAMessage": lambda f: f.raw(struct.pack("!i", 100) + b"{"),
    "LongText": lambda f: f.text(json.dumps({"text": "x" * 2**17})),
    "NoArrays": lambda f: f.video(arrays=b""),
    "Flood": lambda f: [f.text(json.dumps({"text": f.fields["backend"]})) for _ in iter(int, 1)],
    "NoDescriptorAtAll": lambda f: f.video(handover=NEW),
}


class Forging(BadReader):
    """Sends its message as soon as frames are asked for, and waits for what becomes of it."""

    def read(self, indices: Any) -> Any:
        name = type(self).__name__
        ATTACKS[name](Forger(self.index.path, name))
        time.sleep(SECONDS)


globals().update({name: type(name, (Forging,), {"__module__": __name__}) for name in ATTACKS})
