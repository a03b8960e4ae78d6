"""The files of a checkpoint: in a folder, on the Hugging Face Hub, shipped with this package, or a tiny model."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from gstep.checkpoints import tiny
from gstep.errors import ModelError
from gstep.lazy import did_you_mean

#: Trained checkpoints that come with this package; each has its model card.
SHIPPED: Mapping[str, Path] = {"shapes": Path(__file__).parent / "shipped" / "shapes"}


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint by name. Pickles; every node uses, downloads or builds its own copy.

    Attributes:
        kind: where the checkpoint is.
        location: the absolute folder, the Hugging Face id, or the name of a model that comes with this package.
        revision: the commit sha of a Hugging Face id, else None.
    """

    kind: Literal["folder", "hub", "shipped", "tiny"]
    location: str
    revision: str | None = None

    @classmethod
    def locate(cls, model: str, revision: str | None = None) -> CheckpointFiles:
        """Find the files of a model argument; a Hugging Face id is resolved to its commit, on the Hub or in its cache.

        Raises ModelError if it is neither a folder, nor a model of this package, nor a reachable id.
        """
        folder = Path(model).expanduser()
        own_kind = _package_kind(model) or ("folder" if model and folder.is_dir() else None)
        if own_kind is not None and revision is not None:
            raise ModelError(f"a revision ({revision!r}) is for a Hugging Face id; {model!r} is a {own_kind} model")
        if own_kind is not None:
            return cls(own_kind, str(folder.resolve()) if own_kind == "folder" else model)
        if model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model or folder.exists():
            raise ModelError(
                f"{model!r} is no folder on this machine: pass a model folder, a Hugging Face id (owner/name), or one "
                f"of {', '.join((*SHIPPED, *tiny.TINY))}"
            )
        if "/" not in model and (hint := did_you_mean(model, (*SHIPPED, *tiny.TINY))):
            raise ModelError(
                f"{model!r} is no folder here, no model of this package{hint}, and no owner/name of the hub"
            )
        return cls("hub", model, _resolve_commit(model, revision))

    def find(self, filename: str) -> Path | None:
        """Return the local path of a file, downloaded or built if need be; None if the checkpoint has no such file."""
        if self.revision is not None:
            cached = _fetch(self.location, self.revision, filename)
            return None if cached is None else Path(cached)
        path = self.folder() / filename
        return path if path.is_file() else None

    def has(self, filename: str) -> bool:
        """Return True if the checkpoint has a file; nothing is downloaded."""
        if self.revision is not None:
            return _fetch(self.location, self.revision, filename, dry_run=True) is not None
        return self.find(filename) is not None

    def folder(self) -> Path:
        """Return the folder of a checkpoint that is not on the Hub; a tiny model is built if it is missing."""
        assert self.kind != "hub"
        if self.kind == "shipped":
            return SHIPPED[self.location]
        return tiny.build(self.location) if self.kind == "tiny" else Path(self.location)

    def names(self, *suffixes: str) -> list[str]:
        """List the file names with any of these suffixes in a local folder, sorted; empty for the Hub."""
        if self.kind == "hub":
            return []
        return sorted(path.name for path in self.folder().iterdir() if path.suffix in suffixes)

    def read_json(self, filename: str) -> dict[str, Any] | None:
        """Read the object in a JSON file; None if there is no such file.

        Raises ModelError for any other content.
        """
        path = self.find(filename)
        if path is None:
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{path} is no JSON ({error}): copy it again from the original checkpoint") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path} holds no JSON object: copy it again from the original checkpoint")
        return content


def _package_kind(model: str) -> Literal["shipped", "tiny"] | None:
    """Return the kind of a model that this package provides; None for any other name."""
    if model in SHIPPED:
        return "shipped"
    return "tiny" if model in tiny.TINY else None


def _resolve_commit(repo: str, revision: str | None) -> str:
    """Resolve a branch, tag or sha of a model repository to its commit sha, on the Hub or (offline) in its cache.

    Raises ModelError if the repository is neither reachable nor in the cache, or has no config.json.
    """
    config = _fetch(repo, revision, "config.json")
    if config is None and not constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{repo!r} on the Hugging Face Hub has no config.json: it is no model of transformers, or an "
            "adapter, which has to be merged into its base model first"
        )
    if config is None:
        raise ModelError(_describe_unreachable(repo, "config.json"))
    return Path(config).parent.name


def _fetch(repo: str, revision: str | None, filename: str, *, dry_run: bool = False) -> Any:
    """Download a file of a repository unless it is cached; return its path, or None if there is no such file.

    With ``dry_run`` nothing is downloaded, and the result only tells by None if the file is absent. If HF_HUB_OFFLINE
    is set, a file that is not cached counts as absent. Raises ModelError for any other failure.
    """
    try:
        offline = not _has_address(constants.ENDPOINT)
        return hf_hub_download(repo, filename, revision=revision, dry_run=dry_run, local_files_only=offline)
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE or _is_cached_absent(repo, revision, filename):
            return None
        # Not treated as missing: settings must not depend on the state of the network.
        raise ModelError(_describe_unreachable(repo, filename)) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"the model {repo!r} has no revision {revision!r} on the Hugging Face Hub") from error
    except EntryNotFoundError:
        return None
    except (RepositoryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        raise ModelError(f"{_describe_unreachable(repo, filename)} ({type(error).__name__})") from error


@cache
def _has_address(endpoint: str) -> bool:
    """Return True if the Hub's host name resolves, or a proxy resolves it; looked up once in a process.

    Without an address the client would retry each file for 30 seconds.
    """
    host = urlsplit(endpoint).hostname
    if host is None or getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _is_cached_absent(repo: str, revision: str | None, filename: str) -> bool:
    """Return True if the Hub client's cache remembers that the repository has no such file."""
    cached = try_to_load_from_cache(repo, filename, revision=revision)
    return cached is not None and not isinstance(cached, str)  # the cache remembers files that do not exist


def _describe_unreachable(repo: str, filename: str) -> str:
    """Format the error message for a repository that is neither reachable nor in the cache."""
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return (
        f"{repo!r} is no folder here, and {filename} of a model of that name could neither be fetched from the Hugging "
        f"Face Hub{offline} nor found in its cache {constants.HF_HUB_CACHE}: check the name, the network and, for a "
        "gated model, HF_TOKEN; or download it elsewhere and pass the folder"
    )
