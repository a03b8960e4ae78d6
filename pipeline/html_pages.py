"""Self-contained HTML pages: templates, style sheets and scripts of a package."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def make_environment(package: str) -> Environment:
    """Create a Jinja environment for the templates of ``package``, which escapes values.

    Undefined values raise an error. Templates of ``pipeline`` are found too, unless the package has one of the same
    name.
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


def read_asset(package: str, name: str) -> Markup:
    """Read a file from the template folder of ``package`` as markup, unescaped."""
    return Markup((files(package) / "templates" / name).read_text(encoding="utf-8"))


def compute_policy_hash(script: str) -> str:
    """Return the base64 SHA-256 of the only script that a page may run, for its content security policy.

    The template must put ``script`` on a line of its own, because the hash covers the newline before it.
    """
    return base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
