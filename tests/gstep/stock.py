"""The stock code of transformers without what needs torchvision: single functions, and half of a processor."""

import ast
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.image_utils import SizeDict
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata


class _Base:
    """Stands in for the stock base class: what it is asked to resize to is the result."""

    max_video_tokens: int

    def resize(self, image: torch.Tensor, size: SizeDict, resample: Any) -> tuple[int, int]:
        return size.height, size.width


def stock_processor(module: str, class_name: str, method: str) -> Any:
    """Return an object of ``class_name`` of ``transformers.models.<module>`` with this one of its methods alone."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "models" / f"{module}.py").read_text())
    (smart_resize,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize")
    (processor,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    # The method alone, under the same class name, so that its super() finds the stand-in.
    processor.body = [node for node in processor.body if isinstance(node, ast.FunctionDef) and node.name == method]
    processor.bases, processor.decorator_list = [ast.Name("Base", ast.Load())], []
    given = {"math": math, "np": np, "torch": torch, "SizeDict": SizeDict, "VideoMetadata": VideoMetadata}
    names: dict[str, Any] = {**given, "Base": _Base}
    code = ast.fix_missing_locations(ast.Module([smart_resize, processor], []))
    exec(compile(code, module, "exec"), names)  # noqa: S102 - of the installed package
    return names[class_name]()


def stock_size(module: str, class_name: str, settings: Mapping[str, Any], shape: tuple[int, int, int]) -> Any:
    """Return the (height, width) that ``class_name.resize`` of ``transformers.models.<module>`` gives [T,H,W] frames.

    Raises ValueError where the stock code does.
    """
    stock = stock_processor(module, class_name, "resize")
    stock.max_video_tokens = settings.get("max_video_tokens")
    T, H, W = shape
    return stock.resize(
        videos=torch.empty(1, T, 3, H, W, device="meta"),
        size=SizeDict(**settings["size"]),
        resample=3,
        factor=settings["patch_size"] * settings["merge_size"],
        temporal_factor=settings["temporal_patch_size"],
        cap_pixels_per_frame=settings.get("cap_pixels_per_frame"),
    )


def stock_frames(module: str, class_name: str, n_frames: int, rate: float, fps: float, min_frames: int) -> list[int]:
    """Return the frames that ``class_name.sample_frames`` takes at ``fps`` of a video of ``rate`` frames a second."""
    stock = stock_processor(module, class_name, "sample_frames")
    stock.fps, stock.num_frames, stock.temporal_patch_size = None, None, 2
    stock.min_frames, stock.max_frames = min_frames, 768
    return [int(i) for i in stock.sample_frames(VideoMetadata(total_num_frames=n_frames, fps=rate), fps=fps)]


def stock_video_text(metadata: VideoMetadata, grid_thw: Sequence[int]) -> str:
    """Return what Qwen3VLProcessor writes for a video in place of its token: times, markers and placeholders."""
    processor = object.__new__(Qwen3VLProcessor)  # its video processor needs torchvision: what is asked of it is these
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor.video_token, processor.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    inputs = {"video_metadata": [metadata], "video_grid_thw": torch.tensor([list(grid_thw)])}
    return processor.replace_video_token(inputs, 0)
