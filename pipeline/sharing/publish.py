"""``jobs.export --to hf://``: an exported cache as a dataset of the Hugging Face Hub, in commits of some files each.

Names of shards hold a hash of their content, so a file of the same name and size is never sent again: the same call
goes on where one was stopped. Rows are committed after the tokens that they name; at last files go that the copy no
longer has, such as the tokens of removed videos.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipeline.cache.header import differences
from pipeline.cache.live_rows import TOKENS, VIDEOS
from pipeline.cache.reader import HEADER, read_header
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.sharing.export import CARD
from pipeline.storage.hub import HubFiles
from pipeline.storage.stores import LocalStore

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_PLACE: Final = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
_PARTS: Final = (TOKENS, VIDEOS)  # in the order of upload
_FILES: Final = 100  # of a commit
_LOGIN: Final = "hf auth login, or HF_TOKEN, gives the token of an account that may write there"


@dataclass
class Published:
    """The result of an upload: files and bytes that were sent, files that were there already, files deleted there."""

    sent: int = 0
    sent_bytes: int = 0
    there: int = 0
    deleted: int = 0


def repository_of(place: str) -> tuple[str, str | None]:
    """Return the repository and the revision (None: main) that hf://datasets/OWNER/NAME[@REVISION] names.

    Raises UsageError for another address.
    """
    if not (found := _PLACE.fullmatch(place.rstrip("/"))):
        raise UsageError(f"{place}: a dataset of the hub is hf://datasets/OWNER/NAME, or .../NAME@REVISION")
    return found[1], found[2]


def publish(copy: LocalStore, place: str, say: Callable[[str], object]) -> Published:
    """Upload an exported cache to a dataset of the hub, which is made, private, where there is none.

    A card that is there already stays as it is. Raises UsageError where the dataset holds something else,
    IdentityMismatch where it holds a cache of another identity, both before anything is sent, and OSError.
    """
    repository, revision = repository_of(place)
    with _reaching(place):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile  # noqa: PLC0415
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

        disable_progress_bars()
        api = HfApi()
        api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        listed = api.list_repo_tree(repository, recursive=True, repo_type="dataset", revision=revision)
        remote = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    _check_dataset(copy, place, remote)
    finished = {name for part in _PARTS for name in copy.names(part, ".parquet")}
    mine = {file.name: file.size for part in _PARTS for file in copy.listed(part) if file.name in finished}
    new = [name for name, size in mine.items() if remote.get(name) != size]
    gone = [name for name in _data(remote) if name not in mine and name.endswith(".parquet")]
    done = Published(there=len(mine) - len(new))

    def commit(operations: Sequence[CommitOperationAdd | CommitOperationDelete], what: str) -> None:
        with _reaching(place):
            api.create_commit(repository, operations, commit_message=what, repo_type="dataset", revision=revision)

    def added(names: Sequence[str]) -> list[CommitOperationAdd]:
        return [CommitOperationAdd(name, copy.root / name) for name in names]

    if HEADER not in remote:  # it says whose the dataset is
        commit(added([HEADER]), "Say what the videos' tokens were made with")
    for start in range(0, len(new), _FILES):
        names = new[start : start + _FILES]
        commit(added(names), f"Add {len(names)} files")
        done.sent += len(names)
        done.sent_bytes += sum(mine[name] for name in names)
        say(f"{done.sent:,} of {len(new):,} files, {done.sent_bytes:,} bytes sent to {place}")
    last: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete(name) for name in gone]
    last += added([] if CARD in remote else [CARD])
    if last:
        commit(last, f"Write the card; delete {len(gone)} files that the cache no longer has")
    done.deleted = len(gone)
    if CARD in remote:
        say(f"note: the {CARD} of {place} stays as it is; {copy.root / CARD} has the counts of now")
    return done


def _check_dataset(copy: LocalStore, place: str, remote: dict[str, int]) -> None:
    """Raise UsageError or IdentityMismatch unless a dataset's files are none, or a cache made as the copy was."""
    if HEADER not in remote:
        if others := _data(remote):
            raise UsageError(f"{place} holds files that are no cache ({others[0]}): name another dataset")
        return
    header = json.loads(HubFiles().read(f"{place.rstrip('/')}/{HEADER}"))
    mine = read_header(copy)["identity"]
    if wrong := differences(header["identity"], mine, has="the dataset has", other="this cache"):
        lines = "\n  ".join(wrong)
        raise IdentityMismatch(f"{place} holds a cache that was not made alike:\n  {lines}\nName another dataset.")


def _data(names: Iterable[str]) -> list[str]:
    """Return the names of files in the folders of tokens and rows."""
    return [name for name in names if name.partition("/")[0] in _PARTS]


@contextmanager
def _reaching(place: str) -> Iterator[None]:
    """Convert the errors of the hub's clients to OSError that names the place, in one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - the hub's clients raise errors of several libraries
        said = str(error).strip().split("\n", 1)[0]
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = f": {_LOGIN}" if status in {401, 403} else ""
        raise OSError(errno.EIO, f"the hub did not take it: {type(error).__name__}: {said}{remedy}", place) from None
