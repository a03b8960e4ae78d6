"""The part of KubeRay's schema that the recipe of a RayJob uses, cut out of the whole: 1.4 MB, nearly all of it pods'.

``git show v1.7.0:ray-operator/config/crd/bases/ray.io_rayjobs.yaml > crd.yaml`` in a clone of ray-project/kuberay, then
``python -m tests.jobs.cluster.crd crd.yaml > tests/jobs/cluster/rayjob_schema.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.paths import ROOT

RECIPE = ROOT / "jobs" / "cluster" / "rayjob.yaml"
SCHEMA = Path(__file__).with_name("rayjob_schema.json")
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "required", "anyOf", "x-kubernetes-int-or-string")


def used_part(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Cut a schema down to the fields that ``value`` has, and allow no others. KeyError where it has no such field."""
    kept = {name: schema[name] for name in _KEPT if name in schema}
    if isinstance(value, list):
        parts = [used_part(schema["items"], item) for item in value]
        return {**kept, "items": _merged(parts)}
    if not isinstance(value, dict) or ("properties" not in schema and "additionalProperties" not in schema):
        return kept
    if "properties" not in schema:  # a map, whose keys are the user's
        return {
            **kept,
            "additionalProperties": _merged([used_part(schema["additionalProperties"], one) for one in value.values()]),
        }
    fields = {name: used_part(schema["properties"][name], field) for name, field in sorted(value.items())}
    return {**kept, "properties": fields, "additionalProperties": False}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the parts of one schema that several values use."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, held in part.items():
            both = isinstance(held, dict) and isinstance(whole.get(name), dict)
            whole[name] = _merged([whole[name], held]) if both else held
    return whole


def main(crd: Path) -> None:
    versions = yaml.load(crd.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1")
    json.dump(used_part(schema, yaml.safe_load(RECIPE.read_text())), sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
