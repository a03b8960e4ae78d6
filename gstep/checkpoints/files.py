"""The files of a checkpoint: in a folder, on the Hugging Face Hub, shipped with this package, or of a tiny model."""

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

import huggingface_hub
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
from gstep.lazy import format_suggestion

#: Trained checkpoints that come with this package; each has its model card.
SHIPPED: Mapping[str, Path] = {"shapes": Path(__file__).parent / "shipped" / "shapes"}
# Every repository on the Hub has this file. No model needs it, so only a download of the whole repository fetches it.
# If such a download was interrupted, weights are usually missing, which raises another error.
_IN_EVERY_REPOSITORY = ".gitattributes"


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint by name. Picklable; every node uses, downloads or builds its own copy.

    Attributes:
        location: the absolute folder, the Hugging Face id, or the name of a model that comes with this package.
        revision: the commit sha of a Hugging Face id, otherwise None.
        published: the files that every published checkpoint of the family has.
        usual: the files that checkpoints of the family may lack. If the Hub is unreachable, such a file counts as
            absent only if the whole repository was downloaded.
    """

    kind: Literal["folder", "hub", "shipped", "tiny"]
    location: str
    revision: str | None = None
    published: frozenset[str] = frozenset()
    usual: frozenset[str] = frozenset()

    @classmethod
    def locate(cls, model: str, revision: str | None = None) -> CheckpointFiles:
        """Find the files of a model argument; a Hugging Face id is resolved to its commit, on the Hub or in its cache.

        For an id, config.json is downloaded. A folder has precedence over an id, and a model of this package over both.

        Raises:
            ModelError: it is neither a folder, nor a model of this package, nor a Hugging Face id with a config.json in
                reach; or a revision is given for anything but a Hugging Face id.
        """
        folder = Path(model).expanduser()
        own_kind = _find_package_kind(model) or ("folder" if model and folder.is_dir() else None)
        if own_kind is not None and revision is not None:
            raise ModelError(f"a revision ({revision!r}) is for a Hugging Face id; {model!r} is a {own_kind} model")
        if own_kind is not None:
            return cls(own_kind, str(folder.resolve()) if own_kind == "folder" else model)
        if model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model or folder.exists():
            raise ModelError(
                f"{model!r} is no folder on this machine: pass a model folder, a Hugging Face id (owner/name), or one "
                f"of {', '.join((*SHIPPED, *tiny.TINY))}"
            )
        if "/" not in model and (hint := format_suggestion(model, (*SHIPPED, *tiny.TINY))):
            raise ModelError(
                f"{model!r} is no folder here, no model of this package{hint}, and no owner/name of the hub"
            )
        return cls("hub", model, _resolve_commit(model, revision))

    def find(self, filename: str, *, required: bool = False) -> Path | None:
        """Return the local path of a file, downloaded or built if necessary; None if the checkpoint has no such file.

        If the Hub is unreachable and its cache does not know the file, it counts as absent only if HF_HUB_OFFLINE is
        set or all ``published`` files are cached, and if it is not ``required``, ``published`` or (unless the whole
        repository was downloaded) ``usual``.

        Raises:
            ModelError: the file exists or must be assumed to exist, but cannot be downloaded.
        """
        if self.revision is not None:
            expected = self.published if self._is_cached(_IN_EVERY_REPOSITORY) else self.published | self.usual
            is_required = required or filename in expected or not self._is_downloaded()
            cached = _fetch(self.location, self.revision, filename, required=is_required)
            return None if cached is None else Path(cached)
        path = self.folder() / filename
        return path if path.is_file() else None

    def has(self, filename: str) -> bool:
        """Return True if the checkpoint has a file; nothing is downloaded, but a missing tiny model is built.

        Raises:
            ModelError: the Hub fails with an error other than being unreachable.
        """
        if self.revision is not None:
            return _fetch(self.location, self.revision, filename, dry_run=True) is not None
        return self.find(filename) is not None

    def find_local(self, filename: str) -> Path | None:
        """Return the path of a file if it is on this machine; nothing is downloaded."""
        if self.revision is None:
            return self.find(filename)
        cached = try_to_load_from_cache(self.location, filename, revision=self.revision)
        return Path(cached) if isinstance(cached, str) else None

    def _is_downloaded(self) -> bool:
        """Return True if downloads are turned off, or all ``published`` files are cached."""
        return constants.HF_HUB_OFFLINE or all(map(self._is_cached, self.published))

    def _is_cached(self, filename: str) -> bool:
        """Return True if the Hub client's cache has a file."""
        return isinstance(try_to_load_from_cache(self.location, filename, revision=self.revision), str)

    def require_any(self, *filenames: str) -> None:
        """Raise ModelError if the Hub is unreachable and its cache cannot tell if any of the files exists.

        Nothing is checked after a download of the whole repository, or for models that are not on the Hub.
        """
        if self.revision is None or self._is_cached(_IN_EVERY_REPOSITORY):
            return
        if not any(map(self.has, filenames)):
            for filename in filenames:
                self.find(filename, required=True)

    def folder(self) -> Path:
        """Return the folder of a checkpoint that is not on the Hub; a missing tiny model is built."""
        assert self.kind != "hub"
        if self.kind == "shipped":
            return SHIPPED[self.location]
        return tiny.build(self.location) if self.kind == "tiny" else Path(self.location)

    def names(self, *suffixes: str) -> list[str]:
        """List the names of files with any of these suffixes, sorted; empty for a Hub checkpoint."""
        if self.kind == "hub":
            return []
        return sorted(path.name for path in self.folder().iterdir() if path.suffix in suffixes)

    def read_json(self, filename: str) -> dict[str, Any] | None:
        """Read the object in a JSON file; None if the checkpoint has no such file.

        Raises:
            ModelError: the file is not JSON or not an object, or cannot be downloaded.
        """
        path = self.find(filename)
        if path is None:
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise ModelError(f"{path} is no JSON ({error}): copy it again from the original checkpoint") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path} holds no JSON object: copy it again from the original checkpoint")
        return content


def _find_package_kind(model: str) -> Literal["shipped", "tiny"] | None:
    """Return the kind of a model of this package; None for any other name."""
    if model in SHIPPED:
        return "shipped"
    return "tiny" if model in tiny.TINY else None


def _resolve_commit(repo: str, revision: str | None) -> str:
    """Resolve a branch, tag or sha of a repository to its commit sha, on the Hub or (offline) in its cache.

    Downloads config.json.

    Raises:
        ModelError: the repository is neither reachable nor cached, or has no config.json.
    """
    config = _fetch(repo, revision, "config.json", required=True)
    if config is None:
        raise ModelError(
            f"{repo!r} on the Hugging Face Hub has no config.json: it is not a transformers model, or an "
            "adapter, which has to be merged into its base model first"
        )
    return Path(config).parent.name


def _fetch(repo: str, revision: str | None, filename: str, *, required: bool = False, dry_run: bool = False) -> Any:
    """Download a file of a repository unless it is cached; return its path, or None if there is no such file.

    If the Hub is unreachable (HF_HUB_OFFLINE is set, or there is no network), its cache decides. A file that the cache
    does not know counts as absent unless it is ``required``.

    Args:
        dry_run: True downloads nothing; the result is then anything except None if the file exists.

    Raises:
        ModelError: the file exists or is required but is not cached and the Hub is unreachable, the revision does not
            exist, or the Hub returns another error.
    """
    try:
        offline = not _is_hub_resolvable(constants.ENDPOINT)
        return hf_hub_download(repo, filename, revision=revision, dry_run=dry_run, local_files_only=offline)
    except LocalEntryNotFoundError as error:
        is_present = _look_up_file(repo, revision, filename)
        if dry_run and is_present:
            return filename
        if is_present or (is_present is None and required):
            raise ModelError(_describe_unreachable(repo, filename)) from error
        return None
    except RevisionNotFoundError as error:
        raise ModelError(f"the model {repo!r} has no revision {revision!r} on the Hugging Face Hub") from error
    except EntryNotFoundError:
        return None
    except (RepositoryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        raise ModelError(f"{_describe_unreachable(repo, filename)} ({type(error).__name__})") from error


@cache
def _is_hub_resolvable(endpoint: str) -> bool:
    """Return True if the Hub's host name resolves or a proxy is set; looked up once per process and endpoint."""
    host = urlsplit(endpoint).hostname
    if host is None or getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _look_up_file(repo: str, revision: str | None, filename: str) -> bool | None:
    """Return whether a repository has a file, according to the Hub client's cache; None if the cache does not tell."""
    cached = try_to_load_from_cache(repo, filename, revision=revision)
    if cached is not None:
        return isinstance(cached, str)
    if not hasattr(huggingface_hub, "get_cached_repo_tree"):  # before huggingface_hub 2
        return None
    try:
        return filename in {file.path for file in huggingface_hub.get_cached_repo_tree(repo, revision=revision)}
    except huggingface_hub.errors.CachedRepoTreeNotFoundError:
        return None


def _describe_unreachable(repo: str, filename: str) -> str:
    """Return the error message for a file that is neither cached nor reachable."""
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub is out of reach"
    return (
        f"{repo!r} is no folder here, and {filename} of the model of that name is not in the cache of the Hugging Face "
        f"Hub ({constants.HF_HUB_CACHE}) and could not be fetched ({reason}): check the name, the network and, for a "
        f"gated model, HF_TOKEN; or download the whole repository (hf download {repo}) and pass the folder"
    )
