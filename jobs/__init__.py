"""Commands: ``gstep-cache <name>`` or ``python -m jobs.<name>``, locally or through ``ray job submit``.

Importing this package ends the process with code 2 and a remedy if Python is older than 3.11, a required package is not
installed, or another package hides ``gstep`` or ``pipeline``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

# Packages that the commands import, some of them late. A Python without them is not this package's environment.
_PACKAGES = (
    "rich",
    "numpy",
    "pyarrow",
    "torch",
    "ray",
    "transformers",
    "safetensors",
    "tokenizers",
    "av",
    "yaml",
    "jinja2",
)
_CLONE = Path(__file__).parents[1]
_ENVIRONMENT = _CLONE / ".venv"

_missing = [_name for _name in _PACKAGES if find_spec(_name) is None]
if sys.version_info < (3, 11) or _missing:
    _state = f"lacks {', '.join(_missing)}" if _missing else "is older than 3.11"
    _remedy = (
        f"Activate the environment: source {_ENVIRONMENT}/bin/activate"
        if _ENVIRONMENT.exists()
        else "Activate the environment that this package is installed in, or create it with Python 3.11 or newer: "
        f"cd {_CLONE} && python3 -m venv .venv && .venv/bin/pip install -e '.[sample]' && source .venv/bin/activate"
    )
    print(f"error: {sys.executable} is not the environment of gstep-cache: it {_state}. {_remedy}", file=sys.stderr)
    raise SystemExit(2)

for _package in ("gstep", "pipeline"):
    # ``python -m`` puts the current folder first on the path: a user's file there hides a package of the same name.
    _spec = find_spec(_package)
    if _spec is not None and _spec.origin != str(Path(__file__).parents[1] / _package / "__init__.py"):
        _origin = _spec.origin or ", ".join(_spec.submodule_search_locations or ())
        print(
            f"error: {_origin} hides the package {_package!r} that this command needs: run it in another folder, or as "
            "gstep-cache",
            file=sys.stderr,
        )
        raise SystemExit(2)
