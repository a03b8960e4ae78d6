"""The RayJob, against the part of KubeRay's own schema that it uses, and its command against this package's flags."""

import copy
import json
import shlex
from importlib.metadata import version

import jsonschema
import pytest
import yaml

from jobs import prune
from tests.jobs.cluster.crd import RECIPE, SCHEMA
from tests.jobs.jobs import run_here


@pytest.fixture
def recipe():
    return copy.deepcopy(yaml.safe_load(RECIPE.read_text()))  # without what its anchors share


def check(recipe):
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(recipe)


def test_every_field_is_one_of_kuberay_with_a_value_of_its_type(recipe):
    check(recipe)
    assert (recipe["apiVersion"], recipe["kind"]) == ("ray.io/v1", "RayJob")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["backOffLimit"], 3),
        (["backoffLimit"], "3"),
        (["rayClusterSpec", "autoscalerOptions", "version"], "v3"),
        (["rayClusterSpec", "workerGroupSpecs", 0, "replicaz"], 1),
        (
            ["rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "volumeMounts", 0, "path"],
            "/x",
        ),
        (["rayClusterSpec", "workerGroupSpecs", 1, "groupName"], None),
    ],
)
def test_the_check_finds_what_kuberay_would_refuse(recipe, path, value):
    place = recipe["spec"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(recipe)


def test_its_command_is_one_that_the_package_takes(recipe, tmp_path):
    python, m, module, videos, *flags = shlex.split(recipe["spec"]["entrypoint"])
    assert (python, m, module) == ("python", "-m", "jobs.prune")
    flags[flags.index("--model") + 1], flags[flags.index("--out") + 1] = "tiny", str(tmp_path / "cache")
    done = run_here(prune, [*flags, "--dry-run"])  # of the clips that come with the package
    assert done.returncode == 0, done.stdout
    assert videos.startswith("/data/")


def test_gpus_that_the_command_waits_for_can_come(recipe):
    words = shlex.split(recipe["spec"]["entrypoint"])
    groups = recipe["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = [int(limits(group).get("nvidia.com/gpu", 0)) for group in groups]
    assert sorted(gpus) == [0, 8], "a group with GPUs and one without"
    most = sum(group["maxReplicas"] * count for group, count in zip(groups, gpus, strict=True))
    assert 0 < int(words[words.index("--min-gpus") + 1]) <= most
    assert all(group["minReplicas"] == 0 for group in groups)


def test_all_pods_have_one_image_the_same_disks_and_the_ray_of_the_lock(recipe):
    spec = recipe["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    containers = [one for pod in pods for one in (*pod["containers"], *pod.get("initContainers", ()))]
    assert len({one["image"] for one in containers}) == 1
    for pod in pods:
        named = {volume["name"] for volume in pod["volumes"]}
        mounts = [
            m["name"] for one in (*pod["containers"], *pod.get("initContainers", ())) for m in one["volumeMounts"]
        ]
        assert set(mounts) == named
    assert spec["rayVersion"] == version("ray")


def limits(group):
    (container,) = group["template"]["spec"]["containers"]
    return container["resources"]["limits"]
