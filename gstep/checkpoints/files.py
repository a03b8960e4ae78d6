"""The files of a checkpoint, wherever it is: in a folder, on the Hugging Face Hub, in this package, or made here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gstep.checkpoints import hub, shipped, tiny
from gstep.errors import ModelError
from gstep.lazy import did_you_mean


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint by name. Pickles; every node finds (downloads, builds) its own copy.

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
        """Find the files of a model argument.

        Raises ModelError where it is neither a folder, a model of ours nor a reachable id.
        """
        folder = Path(model).expanduser()
        here = _own_kind(model) or ("folder" if model and folder.is_dir() else None)
        if here is not None and revision is not None:
            raise ModelError(f"a revision ({revision!r}) belongs to a Hugging Face id; {model!r} is a {here} model")
        if here is not None:
            return cls(here, str(folder.resolve()) if here == "folder" else model)
        if model.startswith(("/", ".", "~")) or model.count("/") > 1 or not model or folder.exists():
            raise ModelError(
                f"{model!r} is no folder on this machine: pass a model folder, a Hugging Face id (owner/name), or one "
                f"of {', '.join((*shipped.SHIPPED, *tiny.TINY))}"
            )
        if "/" not in model and (hint := did_you_mean(model, (*shipped.SHIPPED, *tiny.TINY))):
            raise ModelError(
                f"{model!r} is no folder here, no model of this package{hint}, and no owner/name of the hub"
            )
        return cls("hub", model, hub.commit_of(model, revision))

    def find(self, filename: str) -> Path | None:
        """Return the local path of a file, downloaded or built if need be; None where there is no such file."""
        if self.revision is not None:
            return hub.find_file(self.location, self.revision, filename)
        path = self.folder() / filename
        return path if path.is_file() else None

    def has(self, filename: str) -> bool:
        """Return whether the checkpoint has a file; nothing is downloaded."""
        if self.revision is not None:
            return hub.has_file(self.location, self.revision, filename)
        return self.find(filename) is not None

    def folder(self) -> Path:
        """Return the folder of a checkpoint that is not on the Hub."""
        assert self.kind != "hub"
        if self.kind == "shipped":
            return shipped.SHIPPED[self.location]
        return tiny.build(self.location) if self.kind == "tiny" else Path(self.location)

    def names(self, *suffixes: str) -> list[str]:
        """List the names with one of these endings in a local folder, sorted; none for the Hub."""
        if self.kind == "hub":
            return []
        return sorted(path.name for path in self.folder().iterdir() if path.suffix in suffixes)

    def read_json(self, filename: str) -> dict[str, Any] | None:
        """Read the object in a JSON file, or None where there is no such file.

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


def _own_kind(model: str) -> Literal["shipped", "tiny"] | None:
    """Return the kind of a model name that this package provides itself, or None for any other name."""
    if model in shipped.SHIPPED:
        return "shipped"
    return "tiny" if model in tiny.TINY else None
