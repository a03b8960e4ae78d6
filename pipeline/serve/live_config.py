"""The options of a server that prunes the videos of its requests: one dataclass that flags come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gstep.methods import LIVE_METHODS
from pipeline.errors import UsageError
from pipeline.options import DTYPES, check, check_ratio, named_values, option
from pipeline.serve.config import ServerOptions

_HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.I)


@dataclass(frozen=True, kw_only=True)
class LiveConfig(ServerOptions):
    """The options of ``python -m jobs.serve --live``. Raises UsageError where a value makes no sense."""

    live: bool = option(False, "prune the videos of requests as vLLM encodes them, without a cache", group="videos")
    num_frames: int = option(
        32, "frames of a video, evenly spread; a video that has fewer gives all of its frames", metavar="T"
    )
    media_domain: list[str] = option(
        [],
        "a host that videos may be fetched from; may be repeated (default: none, so that requests carry their videos "
        "as data URLs). Redirections are not followed",
        metavar="HOST",
    )
    media_path: str | None = option(
        None, "a folder of the server whose files requests may name as file:// URLs (default: none)", metavar="FOLDER"
    )
    method: str = option("gstep", f"pruning method: {', '.join(LIVE_METHODS)}", metavar="METHOD", group="pruning")
    method_param: list[str] = option(
        [], "a parameter of the method, such as alpha=0.5; may be repeated", metavar="NAME=VALUE"
    )
    retention_ratio: float = option(
        0.25, "share of the visual tokens of a video to keep: 0.25 or 25%%", metavar="R", share=True
    )
    seed: int = option(0, "seed of the methods that draw random numbers", metavar="N")
    model: str | None = option(
        None, "a Hugging Face id or folder: Qwen2.5-VL, Qwen3-VL or Qwen3.5", metavar="MODEL", group="model"
    )
    dtype: str = option("auto", "the model's arithmetic; auto is bfloat16 on GPUs and float32 on CPUs", choices=DTYPES)
    max_request_bytes: int = option(
        2**26, "largest body of a request, with its videos; a larger body gets a 413", metavar="N", group="server"
    )

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value, also of ``method_param``, ``media_domain`` and ``media_path``."""
        super().__post_init__()
        if self.model is None:
            raise UsageError("--model is missing: a Hugging Face id or a folder")
        check_ratio("retention_ratio", self.retention_ratio)
        if self.retention_ratio == 1.0:
            raise UsageError("--retention-ratio must be below 1, got 1.0: vllm serve MODEL alone keeps all tokens")
        check(self.num_frames >= 2, "num_frames", "at least 2, the frames of a temporal patch", self.num_frames)
        check(self.seed >= 0, "seed", "at least 0", self.seed)
        wrong = [name for name in self.media_domain if not _HOST_NAME.fullmatch(name)]
        check(not wrong, "media_domain", "a host name without a port, such as videos.example.org", wrong)
        if self.media_path is not None and not Path(self.media_path).is_dir():
            raise UsageError(f"--media-path {self.media_path}: there is no such folder")
        self.method_params()

    def method_params(self) -> dict[str, str]:
        """Parse ``--method-param`` into texts by name."""
        return named_values(self.method_param, "--method-param")

    def media_hosts(self) -> list[str]:
        """Return the hosts of ``--media-domain`` in lower case, in which vLLM reads those of URLs."""
        return [name.lower() for name in self.media_domain]
