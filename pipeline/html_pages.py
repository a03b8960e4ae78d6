"""Self-contained HTML pages: the templates and files of a package, and what a page's policy lets run."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def environment(package: str) -> Environment:
    """Return a Jinja environment of a package's templates: values are escaped, and missing values are errors.

    Templates of ``pipeline`` are found too, unless the package has a template of the same name.
    """
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("pipeline")]),  # pipeline has the head of all pages
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return templates


def asset(package: str, name: str) -> Markup:
    """Return the unescaped content of a file beside a package's templates."""
    return Markup((files(package) / "templates" / name).read_text(encoding="utf-8"))


def policy_hash(script: str) -> str:
    """Return the hash of the one script that a page runs, for its content security policy.

    So nothing runs that a name, an annotation or a reply may carry. The template puts ``script`` on a line of its own.
    """
    return base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
