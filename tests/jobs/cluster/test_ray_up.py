"""The cluster for ``ray up``, by Ray's own schema and the checks that the command makes before it starts machines."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.paths import ROOT

RECIPE = ROOT / "jobs" / "cluster" / "ray-up.yaml"


@pytest.fixture
def recipe():
    return copy.deepcopy(yaml.safe_load(RECIPE.read_text()))


def test_it_is_a_cluster_by_rays_schema(recipe):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(recipe, schema)
    whole = prepare_config(recipe)
    validate_config(whole)
    assert "pip install" not in json.dumps(whole), "Ray's defaults would install into the image"


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ((), "max_worker", 3),
        ((), "head_node_type", "none"),
        (("docker",), "images", "x"),
        (("available_node_types", "gpu"), "min_workers", "0"),
        (("available_node_types", "gpu"), "min_workers", 99),
    ],
)
def test_the_check_finds_what_ray_would_refuse(recipe, place, name, value):
    held = recipe
    for one in place:
        held = held[one]
    held[name] = value
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate_config(prepare_config(recipe))


def test_only_workers_are_spot_nodes(recipe):
    types = recipe["available_node_types"]
    spot = {name for name, one in types.items() if "InstanceMarketOptions" in one["node_config"]}
    assert spot == set(types) - {recipe["head_node_type"]}
    assert sum(one.get("max_workers", 0) for one in types.values()) <= recipe["max_workers"]
