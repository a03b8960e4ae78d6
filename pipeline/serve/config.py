"""The options of a server, on cached videos or with live pruning."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from gstep.methods import LIVE_METHODS
from pipeline.errors import UsageError
from pipeline.generate.config import PromptOptions
from pipeline.options import (
    DTYPES,
    S3Options,
    check,
    check_choices,
    check_ratio,
    is_positive,
    option,
    parse_engine_values,
    parse_named_values,
)
from pipeline.rows import Json

KEY = "VLLM_API_KEY"
MISSING_KEY = (
    f"other machines can reach this server, and it has no key. Set {KEY} or --api-key; or give --no-key, to answer "
    "everyone who reaches it"
)
_HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.I)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of every server. Raises UsageError for an invalid value."""

    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id", metavar="REV", group="model")
    served_model_name: str | None = option(None, "what requests call the model (default: --model)", metavar="NAME")
    tensor_parallel: int = option(1, "GPUs that the model is spread over", metavar="N")
    engine_param: list[str] = option(
        [],
        "an argument of vLLM's own server, e.g. gpu_memory_utilization=0.8; may be repeated",
        metavar="NAME=VALUE",
    )
    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0: all addresses of the machine", metavar="HOST", group="server"
    )
    port: int = option(8000, "port to listen on", metavar="PORT")
    api_key: str | None = option(
        None,
        "the key that clients must send (default: VLLM_API_KEY). Without both the server asks for no key; then --host "
        "must be a loopback address",
        metavar="KEY",
        secret=True,
    )
    no_key: bool = option(False, "without a key, also listen on an address that other machines can reach")
    print_command: bool = option(False, "print the command of vLLM's own server that does the same, and exit")
    max_request_bytes: int = option(2**20, "largest body of a request; a larger body gets a 413", metavar="N")
    shutdown_timeout: float = option(
        30.0, "seconds in which running requests may end after SIGTERM; new requests get a 503", metavar="S"
    )

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value, or if other machines can reach the server and it has no key."""
        check_choices(self)
        check(self.tensor_parallel >= 1, "tensor_parallel", "at least 1", self.tensor_parallel)
        check(0 < self.port < 65536, "port", "in [1, 65535]", self.port)
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("--api-key must not be empty")
        if self.no_key and self.api_key is not None:
            raise UsageError("--no-key and --api-key do not go together")
        if self.needs_key and self.api_key is None and not os.environ.get(KEY, "").strip():
            raise UsageError(f"--host {self.host!r}: {MISSING_KEY}")
        check(self.max_request_bytes >= 1024, "max_request_bytes", "at least 1024", self.max_request_bytes)
        check(0 <= self.shutdown_timeout < math.inf, "shutdown_timeout", "0 or above", self.shutdown_timeout)
        if "config" in self.engine_params():
            raise UsageError("--engine-param config: vLLM would not read the file; give each of its options separately")

    @property
    def needs_key(self) -> bool:
        """True if other machines may reach the server and ``no_key`` does not allow that."""
        return not self.no_key and not _is_loopback(self.host)

    def engine_params(self) -> dict[str, Json]:
        """Parse ``--engine-param`` into values by name, decoded from JSON. Raises UsageError unless NAME=VALUE."""
        return parse_engine_values(self.engine_param)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ServerOptions, PromptOptions, S3Options):
    """The options of ``python -m jobs.serve``. Raises UsageError for an invalid value."""

    cache: str = option("cache", "the cache that jobs.prune wrote", positional=True, metavar="CACHE", group="cache")
    caches: list[str] = option(
        [],
        "another cache of the same model, which links name by ?cache=NAME; may be repeated",
        metavar="NAME=PLACE",
        flag="--cache",
    )
    retention_ratio: float | None = option(
        None,
        "share of the visual tokens of a video if its link names no share: 0.25 or 25%% (default: all that is stored)",
        metavar="R",
        share=True,
    )
    live: bool = option(
        False, "instead of a cache, prune the videos of requests as vLLM encodes them: see jobs.serve --live --help"
    )
    max_tokens_per_video: int | None = option(
        None,
        "reserve memory for videos of N visual tokens, also for videos that are cached later (default: of the largest "
        "cached video)",
        metavar="N",
    )
    held_bytes: int = option(
        2**30, "bytes of tokens that the server and vLLM's engine each keep in memory for later questions", metavar="N"
    )
    refresh_seconds: float = option(10.0, "look for new, redone and removed videos this often, in seconds", metavar="S")

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid value, and for ``live``, which only the command line accepts."""
        super().__post_init__()
        if self.live:
            raise UsageError("--live: write it on the command line, and whole; it takes no cache and has other options")
        ratio = self.retention_ratio
        check_ratio("retention_ratio", ratio)
        check(self.held_bytes >= 2**20, "held_bytes", "at least 1048576", self.held_bytes)
        max_tokens = self.max_tokens_per_video
        check(max_tokens is None or max_tokens >= 1, "max_tokens_per_video", "at least 1", max_tokens)
        check(is_positive(self.refresh_seconds), "refresh_seconds", "above 0", self.refresh_seconds)
        self.parse_named_caches()

    def parse_named_caches(self) -> dict[str, str]:
        """Parse the further caches into name -> location.

        Raises:
            UsageError: an argument is not NAME=PLACE, or a name repeats.
        """
        places: dict[str, str] = {}
        for text in self.caches:
            name, _, place = text.partition("=")
            if not (name.strip() and place.strip()) or name in places:
                raise UsageError(f"--cache takes NAME=PLACE, each NAME once, got {text!r}")
            places[name] = place
        return places


@dataclass(frozen=True, kw_only=True)
class LiveConfig(ServerOptions):
    """The options of ``python -m jobs.serve --live``. Raises UsageError for an invalid value."""

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
        """Raise UsageError if ``model`` is None, the ratio is 1, ``media_path`` is no folder, or a value is invalid."""
        super().__post_init__()
        if self.model is None:
            raise UsageError("--model is missing: a Hugging Face id or a folder")
        check_ratio("retention_ratio", self.retention_ratio)
        if self.retention_ratio == 1.0:
            raise UsageError("--retention-ratio must be below 1, got 1.0: vllm serve MODEL alone keeps all tokens")
        check(self.num_frames >= 2, "num_frames", "at least 2, the frames of a temporal patch", self.num_frames)
        check(self.seed >= 0, "seed", "at least 0", self.seed)
        invalid_hosts = [name for name in self.media_domain if not _HOST_NAME.fullmatch(name)]
        check(
            not invalid_hosts, "media_domain", "a host name without a port, such as videos.example.org", invalid_hosts
        )
        if self.media_path is not None and not Path(self.media_path).is_dir():
            raise UsageError(f"--media-path {self.media_path}: there is no such folder")
        self.parse_method_params()

    def parse_method_params(self) -> dict[str, str]:
        """Parse ``--method-param`` into texts by name. Raises UsageError if an argument is not NAME=VALUE."""
        return parse_named_values(self.method_param, "--method-param")

    def list_media_hosts(self) -> list[str]:
        """Return the hosts of ``--media-domain`` in lower case, as vLLM needs them."""
        return [name.lower() for name in self.media_domain]


def _is_loopback(host: str) -> bool:
    """Return True if every address of a host, which is looked up, is a loopback address; False if it does not exist.

    An empty host stands for all addresses of the machine.
    """
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)}
    except (OSError, UnicodeError):  # no such host: :func:`check_port` raises an error
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def check_port(host: str, port: int) -> None:
    """Raise UsageError if the server cannot listen on this port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as port_socket:
        port_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            port_socket.bind((host, port))
        except OSError as error:
            raise UsageError(f"--host {host} --port {port}: {error.strerror}; name another --host or --port") from error
