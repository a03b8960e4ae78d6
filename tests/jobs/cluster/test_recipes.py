"""The recipes: files that parse by their schemas, commands that the package takes, locks with all that it asks for."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

from jobs import prune
from pipeline.runner import monitor
from tests.builders.archives import write_tar
from tests.builders.runs import run_here
from tests.paths import ROOT

CLUSTER = ROOT / "jobs" / "cluster"
SCRIPT = str(CLUSTER / "slurm.sh")
IMAGES = {"prune": ("cluster", "s3"), "serve": ("cluster", "s3", "vllm")}
LOCKED = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}")
LINUX = {"platform_machine": "x86_64", "sys_platform": "linux", "python_version": "3.11", "extra": ""}


def test_the_rayjob_has_a_command_that_the_package_takes_and_pods_for_it(tmp_path):
    spec = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())["spec"]
    python, m, module, _videos, *flags = shlex.split(spec["entrypoint"])
    assert (python, m, module) == ("python", "-m", "jobs.prune")
    n_gpus = int(flags[flags.index("--min-gpus") + 1])
    flags[flags.index("--model") + 1], flags[flags.index("--out") + 1] = "tiny", str(tmp_path / "cache")
    done = run_here(prune, [*flags, "--dry-run"])  # of the clips that come with the package
    assert done.returncode == 0, done.stdout

    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        containers = (*pod["containers"], *pod.get("initContainers", ()))
        mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods[1:]]
    gpus = [int(limit.get("nvidia.com/gpu", 0)) for limit in limits]
    most = sum(group["maxReplicas"] * n for group, n in zip(cluster["workerGroupSpecs"], gpus, strict=True))
    assert sorted(gpus) == [0, 8] and 0 < n_gpus <= most


def test_the_cluster_for_ray_up_is_one_by_rays_schema_and_only_its_workers_are_spot_nodes():
    recipe = yaml.safe_load((CLUSTER / "ray-up.yaml").read_text())
    jsonschema.validate(recipe, json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))
    whole = prepare_config(recipe)
    validate_config(whole)
    assert "pip install" not in json.dumps(whole), "Ray's defaults would install into the image"
    types = recipe["available_node_types"]
    spot = {name for name, one in types.items() if "InstanceMarketOptions" in one["node_config"]}
    assert spot == set(types) - {recipe["head_node_type"]}


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_runs_have():
    groups = yaml.safe_load((CLUSTER / "alerts.yml").read_text())["groups"]
    panels = json.loads((CLUSTER / "dashboard.json").read_text())["panels"]
    asked = [rule["expr"] for group in groups for rule in group["rules"]]
    asked += [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name.removesuffix("_total") for name in re.findall(r"ray_gstep_(\w+)", " ".join(asked))}
    assert len(asked) > 10 and named <= set(monitor.METRICS)
    (scraped,) = yaml.safe_load((CLUSTER / "prometheus.yml").read_text())["scrape_configs"]
    assert "prom_metrics_service_discovery.json" in scraped["file_sd_configs"][0]["files"][0]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_lints_and_its_lock_has_what_the_package_asks_for(name):
    file = CLUSTER / f"{name}.Dockerfile"
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FROM python:3.11-" in file.read_text()
    assert re.findall(r"^COPY (\S+) ", file.read_text(), re.MULTILINE) == [f".ci/requirements-{name}.lock", "."]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in IMAGES[name] for line in project["optional-dependencies"][extra]]
    wanted = [Requirement(line) for line in (*project["dependencies"], *extras)]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate(LINUX)]
    locked = dict(LOCKED.findall((ROOT / ".ci" / f"requirements-{name}.lock").read_text()))
    versions = {canonicalize_name(package): number for package, number in locked.items()}
    wrong = [str(one) for one in here if not one.specifier.contains(versions.get(canonicalize_name(one.name), "0"))]
    assert len(here) > 10 and not wrong, "make the locks again: .ci/image-locks"


def test_a_build_gets_the_package_and_no_cache():
    """As Docker reads the file: the last line that fits a path decides."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rooms = {"gstep", "jobs", "pipeline", "pyproject.toml", "README.md", "LICENSE"}
    assert "*" in lines and {line[1:] for line in lines if line.startswith("!")} == rooms | {".ci/requirements-*.lock"}


def script(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)


def slurm(folder, name, **environ):
    """Start the script over a file where Slurm and the command are scripts of a line; return it, and what it prints."""
    environ = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PARTS": "2", **environ}
    return subprocess.run([SCRIPT, name], env=environ, capture_output=True, text=True, check=False)


def test_slurm_gets_the_parts_in_which_videos_are_left_or_not_known_yet(tmp_path, capsys):
    """By what the command says of a part with a video, of one without any and one that is done, and of a tar."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.mp4").write_bytes(b"x")
    write_tar(tmp_path / "b.tar", {"a.mp4": b"x"})
    script(tmp_path / "bin" / "sbatch", 'echo sbatch "$2"')
    answer = f'name={tmp_path}/$3-$(expr "$*" : ".*--shard \\([0-9]\\)")', 'cat "$name"', 'exit "$(cat "$name.code")"'
    script(tmp_path / "bin" / "python", *answer)
    for name, part in (("files", 0), ("files", 1), ("b.tar", 0), ("b.tar", 1)):
        argv = [str(tmp_path / name), "--out", str(tmp_path / "c"), "--shard", f"{part}/2", "--dry-run", "--json"]
        code = prune.main(argv)
        (tmp_path / f"{name}-{part}").write_text(capsys.readouterr().out)
        (tmp_path / f"{name}-{part}.code").write_text(str(code))
    assert sorted((tmp_path / f"files-{part}.code").read_text() for part in (0, 1)) == ["0", "2"]
    has = next(part for part in (0, 1) if (tmp_path / f"files-{part}.code").read_text() == "0")
    assert slurm(tmp_path, "files").stdout == f"sbatch --array={has}\n"
    assert slurm(tmp_path, "b.tar").stdout == "sbatch --array=0,1\n"
    told = json.loads((tmp_path / f"files-{has}").read_text())
    (tmp_path / f"files-{has}").write_text(json.dumps({**told, "n_todo": 0}, indent=2))
    assert slurm(tmp_path, "files").stdout == "nothing is left to do\n"
    script(tmp_path / "bin" / "python", "exit 2")
    assert slurm(tmp_path, "files").returncode == 2


@pytest.mark.parametrize("parts", ["0", "many"])
def test_slurm_refuses_a_number_of_parts_that_is_none(tmp_path, parts):
    done = slurm(tmp_path, "files", PARTS=parts)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"PARTS must be a whole number above 0, got {parts}\n"


HANDLES_SIGTERM = "trap 'exit 130' TERM", "echo started", "while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("run", "code", "requeues"),
    [
        (["exit 0"], 0, False),
        (["exit 1"], 1, True),
        (["exit 2"], 2, False),
        (HANDLES_SIGTERM, 130, True),
        (["echo started", "exec sleep 60"], 143, True),  # the signal came before Python could handle it
    ],
)
def test_a_task_of_slurm_ends_with_its_run_and_is_queued_again_where_that_goes_on(tmp_path, run, code, requeues):
    script(tmp_path / "bin" / "python", *run)
    script(tmp_path / "bin" / "scontrol", 'echo "$@"')
    ids = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    task = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PARTS": "2", **ids}
    with subprocess.Popen([SCRIPT, "files"], env=task, stdout=subprocess.PIPE, text=True) as job:
        if "echo started" in run:
            assert job.stdout.readline() == "started\n"
            job.terminate()
        try:
            said = job.communicate(timeout=30)[0]
        finally:
            job.kill()
    assert (job.returncode, said) == (code, "requeue 7\n" if requeues else "")
