"""Commands: ``gstep-cache <name>`` or ``python -m jobs.<name>``, locally or through ``ray job submit``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

for _room in ("gstep", "pipeline"):
    # ``python -m`` puts the current folder first, and a file of the user's there hides the package of its name.
    _spec = find_spec(_room)
    if _spec is not None and _spec.origin != str(Path(__file__).parents[1] / _room / "__init__.py"):
        _place = _spec.origin or ", ".join(_spec.submodule_search_locations or ())
        print(
            f"error: {_place} hides the package {_room!r} that this command needs: run it in another folder, or as "
            "gstep-cache",
            file=sys.stderr,
        )
        raise SystemExit(2)
