"""Single files of a Hugging Face repository, through the ordinary client: its cache, token and offline switch apply."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path
from typing import Any
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

from gstep.errors import ModelError


def commit_of(repo: str, revision: str | None) -> str:
    """Resolve a branch, tag or sha of a model repository to its commit sha now (offline: in the cache).

    Raises ModelError where the repository cannot be reached and is not in the cache, or has no config.json.
    """
    config = _fetch(repo, revision, "config.json")
    if config is None and not constants.HF_HUB_OFFLINE:
        raise ModelError(f"{repo!r} on the Hugging Face Hub has no config.json: it is no model of transformers")
    if config is None:
        raise ModelError(_unreachable(repo, "config.json"))
    return Path(config).parent.name


def find_file(repo: str, commit: str, filename: str) -> Path | None:
    """Return the local copy of a file, downloaded if need be; None where the repository has no such file.

    Offline, a file that is not in the cache counts as missing. Raises ModelError where the Hub fails.
    """
    path = _fetch(repo, commit, filename)
    return None if path is None else Path(path)


def has_file(repo: str, commit: str, filename: str) -> bool:
    """Return whether the repository has the file (offline: whether the cache has it), without downloading it."""
    return _fetch(repo, commit, filename, dry_run=True) is not None


def _fetch(repo: str, revision: str | None, filename: str, *, dry_run: bool = False) -> Any:
    """Call hf_hub_download, and return None where the file is missing. Raises ModelError for everything else."""
    try:
        offline = not _is_named(constants.ENDPOINT)
        return hf_hub_download(repo, filename, revision=revision, dry_run=dry_run, local_files_only=offline)
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE or _known_absent(repo, revision, filename):
            return None
        # Not counted as missing: settings must not depend on whether the network is up.
        raise ModelError(_unreachable(repo, filename)) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"the model {repo!r} has no revision {revision!r} on the Hugging Face Hub") from error
    except EntryNotFoundError:
        return None
    except (RepositoryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        raise ModelError(f"{_unreachable(repo, filename)} ({type(error).__name__})") from error


@cache
def _is_named(endpoint: str) -> bool:
    """Return whether the Hub's host has an address here; without one the client would try for half a minute a file."""
    host = urlsplit(endpoint).hostname
    if host is None or getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _known_absent(repo: str, revision: str | None, filename: str) -> bool:
    """Return whether the Hub client's cache remembers that the repository has no such file."""
    cached = try_to_load_from_cache(repo, filename, revision=revision)
    return cached is not None and not isinstance(cached, str)  # the cache remembers files that do not exist


def _unreachable(repo: str, filename: str) -> str:
    """Format the error message for a repository that is neither reachable nor in the cache."""
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return (
        f"{repo!r} is no folder here, and {filename} of a model of that name could neither be fetched from the Hugging "
        f"Face Hub{offline} nor found in its cache {constants.HF_HUB_CACHE}: check the name, the network and, for a "
        "gated model, HF_TOKEN; or download it elsewhere and pass the folder"
    )
