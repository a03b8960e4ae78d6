"""A checkpoint's own processor: loaded, recorded while it prepares a video, and replayed for a question.

At encode time the processor's output is recorded, with the shapes of the pixels instead of their values. At question
time, the same processor gets this record instead of a video, and writes the prompt.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gstep.backbones import ModelSource, SampledVideo
from gstep.errors import ModelError
from gstep.language.prompt import MARK, FolderState, chat_template, read_folder_state
from gstep.language.rendering import render_chat_template
from gstep.language.types import ChatMessage
from gstep.lazy import find_torchvision_mismatch

# The approximate frame rate in a video's metadata, so that any time is the time of a frame. Nemotron counts whole
# milliseconds.
_FINE_FPS = 1000
_TORCH = torch.__version__.partition("+")[0]
_INSTALL = f"pip install torch=={_TORCH} 'gstep-cache[generic]' (in a clone: -e '.[generic]'), on every node"


def load_processor(source: ModelSource) -> Any:
    """Return a shallow copy of the checkpoint's processor; the last two that were loaded are cached in this process.

    Its own compression of visual tokens (VideoLLaMA3) is turned off.

    Raises:
        ModelError: a package that it needs is missing or broken, or the checkpoint's files do not make a processor for
            videos.
    """
    _check_torchvision()
    try:
        name, revision = source.pretrained()
        processor = copy.copy(_load_processor(name, revision, read_folder_state(name, revision)))
    except ImportError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(
            f"the processor of {source.name!r} needs a package that is missing ({reason}): {_INSTALL}"
        ) from error
    except Exception as error:  # of any type: the files are the user's, and so may be the classes that they name
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"{source.name!r} has no processor that transformers can load ({reason}): download the whole checkpoint, "
            "with its tokenizer and processor files"
        ) from error
    if getattr(processor, "video_processor", None) is None:
        raise ModelError(f"{source.name!r}: its processor, {type(processor).__name__}, takes no videos")
    return processor


@lru_cache(maxsize=2)
def _load_processor(name: str, revision: str | None, state: FolderState) -> Any:
    """Load the processor of a commit or a folder; ``state`` makes the cache reload a changed folder."""
    from transformers import AutoProcessor  # noqa: PLC0415 - takes seconds

    processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    if hasattr(getattr(processor, "video_processor", None), "use_token_compression"):
        processor.video_processor.use_token_compression = False
    return processor


def _check_torchvision() -> None:
    """Raise ModelError unless torchvision, with which transformers' video processors resize frames, can be imported."""
    build = find_torchvision_mismatch()
    try:
        import torchvision  # type: ignore[import-untyped] # noqa: F401, PLC0415 - only this family needs it
    except (ImportError, RuntimeError) as error:
        if build is None and isinstance(error, ImportError):
            raise ModelError(
                f"video processors of transformers need torchvision, which is not installed: {_INSTALL}"
            ) from error
        reason = build or str(error)  # its kernels were built for another torch
        raise ModelError(
            f"torchvision does not fit torch {torch.__version__} ({reason}): install the build of torchvision that was "
            "made for this torch, from the same package index, on every node"
        ) from error


# ---- a prompt by the processor


def render_conversation(source: ModelSource, processor: Any, messages: Sequence[ChatMessage]) -> str:
    """Apply the processor's chat template to a conversation, up to the start of the model's next message.

    Raises:
        ModelError: the template is missing or not valid, or exceeds the limits of rendering.
        ValueError: the template refuses this conversation.
    """
    return render_chat_template(_ProcessorTemplate(processor), chat_template(source), messages)


class _ProcessorTemplate:
    """The processor's ``apply_chat_template``, since some classes choose another template for videos (SmolVLM)."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def apply_chat_template(self, messages: Sequence[ChatMessage], chat_template: str, **options: Any) -> str:
        """Apply the template that the processor chooses; ``chat_template`` is ignored."""
        text: str = self._processor.apply_chat_template(list(messages), **options)
        return text


def run_processor(processor: Any, text: str, video: Any, metadata: Any, device: str | None = None) -> dict[str, Any]:
    """Run a processor on the text of a prompt, and on the video whose placeholder it contains, if any.

    The frames are not sampled again. MARK splits the text and gives no token. The processor's own errors are passed on.

    Args:
        video: the frames, [F, 3, H, W] uint8, or None; ``metadata`` is their VideoMetadata.
        device: where the frames are resized and normalized; None keeps them where they are.
    """
    processor = copy.copy(processor)
    processor.tokenizer = _PiecewiseTokenizer(processor.tokenizer)
    options: dict[str, Any] = {
        "return_tensors": "pt",
        "return_mm_token_type_ids": True,
    }  # some return them only on request
    bos = processor.tokenizer.bos_token
    if bos is not None and text.startswith(bos):  # as ProcessorMixin.apply_chat_template
        options["add_special_tokens"] = False
    if video is None:
        return dict(processor(text=[text], **options))
    # Some processors fail without the metadata, and those of Qwen-Omni read only ``fps``.
    options |= {"do_sample_frames": False, "return_metadata": True, "video_metadata": [metadata]}
    options["fps"] = metadata.sampled_fps
    # The video processor's own setting: MiniMax's processor turns it off, for callers that have resized the frames.
    options["do_resize"] = getattr(processor.video_processor, "do_resize", True)
    if device is not None:
        options["device"] = device
    return dict(processor(text=[text], videos=[video], **options))


class _PiecewiseTokenizer:
    """A tokenizer that splits texts at MARK, which gives no token; everything else is the stock tokenizer's."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stock"], name)

    def __len__(self) -> int:
        return len(self._stock)

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        """Tokenize a text or a list of texts.

        Texts without MARK go to the stock tokenizer. Otherwise, pieces are tokenized separately and joined; the result
        has only ``input_ids`` and ``attention_mask``.
        """
        texts = [text] if isinstance(text, str) else list(text)
        if not any(MARK in t for t in texts):
            return self._stock(text, *args, **options)
        tensors = options.pop("return_tensors", None)
        encodings = []
        for whole in texts:
            first, *others = whole.split(MARK)
            ids = list(self._stock(first, *args, **options)["input_ids"])
            for piece in others:
                ids += self._stock(piece, *args, **{**options, "add_special_tokens": False})["input_ids"]
            encodings.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        from transformers import BatchEncoding  # noqa: PLC0415 - imported by the processor already

        if isinstance(text, str):
            return BatchEncoding(encodings[0], tensor_type=tensors, prepend_batch_axis=tensors is not None)
        return BatchEncoding({k: [e[k] for e in encodings] for k in encodings[0]}, tensor_type=tensors)


def list_placeholder_texts(processor: Any, config: Any) -> list[str]:
    """List the texts that a processor or model treats as placeholders of images, videos and sounds, sorted."""
    tokenizer = processor.tokenizer
    texts = {getattr(processor, f"{kind}_token", None) for kind in ("video", "image", "audio")}
    ids = {getattr(config, f"{kind}_token_{end}", None) for kind in ("video", "image") for end in ("id", "index")}
    texts |= {tokenizer.convert_ids_to_tokens(i) for i in ids if isinstance(i, int)}
    return sorted(text for text in texts if isinstance(text, str) and len(text) > 1)


def make_metadata(video: SampledVideo) -> Any:
    """Make the VideoMetadata of transformers for sampled frames; times count from the start of the clip.

    The rate is a multiple of the clip's frame rate near 1000 per second, so that every time is the time of a frame, to
    less than a millisecond.
    """
    from transformers.video_utils import VideoMetadata  # noqa: PLC0415 - seconds to import

    clip_fps = video.clip_fps or video.fps
    multiple = max(1, math.floor(_FINE_FPS / clip_fps))
    fps = clip_fps * multiple
    indices = [round(seconds * fps) for seconds in video.times_in_clip]
    total = max(video.clip_frames * multiple, indices[-1] + 1)
    return VideoMetadata(
        total_num_frames=total,
        fps=fps,
        width=video.width,
        height=video.height,
        duration=total / fps,
        frames_indices=indices,
    )


# ---- record and replay


class Recorder:
    """A wrapper of a video processor that keeps its last output, by key, in ``output``."""

    output: Mapping[str, Any]

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the stock video processor, and keep its output: tensors as they are, copies of other values."""
        output = self._stock(*args, **options)
        # The processor may change the output later: the rate in the metadata, for example.
        self.output = {k: value if isinstance(value, Tensor) else copy.deepcopy(value) for k, value in output.items()}
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stock"], name)


class _Replay(Recorder):
    """A video processor that returns a copy of a recorded output, whatever its input."""

    def __init__(self, stock: Any, output: Mapping[str, Any]) -> None:
        super().__init__(stock)
        self.output = output

    def __call__(self, *args: Any, **options: Any) -> Any:
        from transformers import BatchFeature  # noqa: PLC0415 - imported by the processor already

        return BatchFeature(copy.deepcopy(dict(self.output)))


def replay_record(processor: Any, text: str, record: str) -> dict[str, Any]:
    """Run a processor on the text of a prompt with one video, from the video's record alone.

    Raises:
        ValueError: the record is damaged, or lacks what this version of the processor needs.
    """
    from transformers import __version__  # noqa: PLC0415 - imported by the processor already

    output, written_by = decode_record(record)
    processor = copy.copy(processor)
    processor.video_processor = _Replay(processor.video_processor, output)
    frame = torch.zeros(1, 3, 1, 1, dtype=torch.uint8, device="cpu")
    try:
        return run_processor(processor, text, frame, output["video_metadata"][0])
    except Exception as error:  # of any type: the record may be from another version
        raise ValueError(
            f"the processor's record of this video was written by transformers {written_by}, and the processor of "
            f"transformers {__version__} reads more ({type(error).__name__}: {error}): install that version, or prune "
            "the video again"
        ) from error


def encode_record(output: Mapping[str, Any]) -> str:
    """Encode a video processor's output as text, with only the shapes of pixels, or raise ModelError."""
    from transformers import __version__  # noqa: PLC0415 - imported by the processor already

    content = {"transformers": __version__, "output": {key: _to_json(key, value) for key, value in output.items()}}
    packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 9)
    return base64.b64encode(packed).decode()


def decode_record(record: str) -> tuple[dict[str, Any], str]:
    """Decode a text of :func:`encode_record`: the processor's output, and the version of transformers that wrote it.

    Pixels are zeros that take no memory.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        content = json.loads(zlib.decompress(base64.b64decode(record, validate=True)))
        return {key: _from_json(value) for key, value in content["output"].items()}, str(content["transformers"])
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise ValueError(f"the processor's record of this video is damaged ({error}): prune the video again") from error


def _to_json(key: str, value: Any) -> Any:
    """Convert a value of a processor's output to JSON; ``{"kind": ...}`` describes types that JSON does not have.

    Tensors named ``pixel_values...`` and other floating-point tensors with several axes are reduced to dtype and shape.

    Raises:
        ModelError: the type of the value is unknown.
    """
    from transformers.video_utils import VideoMetadata  # noqa: PLC0415 - imported by the processor already

    if isinstance(value, Tensor):
        entry = {"kind": "tensor", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if key.startswith("pixel_values") or (value.is_floating_point() and value.ndim > 1):
            return entry
        if value.is_floating_point():  # one axis, such as seconds per patch
            return entry | {"values": value.tolist()}
        # Indices of patches (Molmo) grow evenly: their differences repeat, and compress by a factor of 100.
        return entry | {
            "steps": torch.diff(value.flatten().long().cpu(), prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        }
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # a NumPy array or scalar
        return {"kind": "array", "dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, VideoMetadata):
        return {"kind": "metadata", "values": {name: _to_json(key, value[name]) for name in value}}
    if isinstance(value, Mapping):
        return {"kind": "dict", "values": {str(name): _to_json(key, part) for name, part in value.items()}}
    if isinstance(value, list | tuple):
        return [_to_json(key, part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(f"the processor returns a {type(value).__name__} in {key}, which cannot be recorded")


def _from_json(value: Any) -> Any:
    """Convert the JSON of :func:`_to_json` back; tensors without values become zeros.

    Damaged JSON raises ValueError, KeyError, TypeError or AttributeError.
    """
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    values = value.get("values")
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']} is not a dtype")
        if "steps" in value:
            return torch.tensor(value["steps"], device="cpu").long().cumsum(0).to(dtype).reshape(value["shape"])
        if values is None:
            return torch.zeros((), dtype=dtype, device="cpu").expand(value["shape"])
        return torch.tensor(values, dtype=dtype, device="cpu").reshape(value["shape"])
    if kind == "array":
        import numpy as np  # noqa: PLC0415 - rarely needed

        return np.asarray(values, dtype=value["dtype"])
    parts = {name: _from_json(part) for name, part in value["values"].items()}
    if kind == "metadata":
        from transformers.video_utils import VideoMetadata  # noqa: PLC0415 - imported by the processor already

        return VideoMetadata(**parts)
    return parts
