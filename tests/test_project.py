"""The house rules: rooms, types, style, and the private names of libraries that an upgrade may take away."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import pipeline
from pipeline.generate.engines.vllm import SUPPORTED_VERSIONS
from tests.paths import ROOT


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]], ids=" ".join
)
def test_checks_are_green(command):
    program = Path(sys.executable).with_name(command[0])
    done = run(str(program), *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_reference_describes_what_is_public_and_its_links_lead_somewhere(tmp_path):
    done = run(sys.executable, str(ROOT / ".ci/api-reference"), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(pipeline.__all__) <= set(re.findall(r'id="(\w+)"', (tmp_path / "pipeline.html").read_text()))
    assert "Add a method" in (tmp_path / "gstep.html").read_text()
    page = tmp_path / "gstep.html"
    page.write_text(page.read_text().replace("</main>", '<a href="nowhere.html">x</a></main>'))
    assert runpy.run_path(str(ROOT / ".ci/api-reference"))["broken"](tmp_path) == ["gstep.html: nowhere.html"]


def test_the_changes_lead_to_the_version_and_the_extra_of_vllm_asks_for_those_that_the_engine_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    titles = re.findall(r"^## (.*)$", (ROOT / ".github/CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0].startswith(version) or (titles[0].startswith("Unreleased") and version in " ".join(titles[:2]))
    assert f"vllm{SUPPORTED_VERSIONS}" in project["optional-dependencies"]["vllm"]


def test_top_level_is_the_four_rooms():
    listed = run("git", "ls-files").stdout.split("\n") if (ROOT / ".git").exists() else []
    top = {name.split("/")[0] for name in listed if name}
    known = {"pipeline", "gstep", "jobs", "tests", "pyproject.toml", "README.md", "LICENSE"}
    assert {name for name in top if not name.startswith(".")} <= known


LIGHT = {  # and what importing it does not load; what loads torch is in gstep/backbones/test_base.py
    "gstep": {"torch", "transformers", "ray", "pyarrow", "av", "decord", "triton"},
    "gstep.backbones.preprocess": {"torch", "transformers"},  # travels to every decoder
    "jobs.prune": {"torch", "ray", "pyarrow", "transformers", "av", "decord"},
    "jobs.generate": {"torch", "ray", "pyarrow", "transformers", "av", "decord"},
    "pipeline.prune.config": {"torch", "ray", "pyarrow", "transformers"},
    # What Ray's workers load each time one starts: decoders and writers never touch a tensor.
    "pipeline.runner.worker_heartbeat": {"torch", "transformers", "av", "pyarrow", "ray.data"},
    "pipeline.prune.write_stage": {"torch", "transformers", "av", "ray.data"},
    "pipeline.prune.decode_stage": {"torch", "transformers", "ray.data"},
}


def test_importing_stays_light():
    """In one process, the lightest first: a module that loads too much shows in its line and in later ones."""
    code = "import importlib, sys\n"
    code += f"for name, absent in {LIGHT!r}.items():\n"
    code += "    importlib.import_module(name)\n    print(name, *sorted(absent & set(sys.modules)))"
    assert run(sys.executable, "-c", code).stdout.split("\n")[:-1] == list(LIGHT)


CONNECTION = "pipeline/runner/cluster/connection.py"


class Private(NamedTuple):
    """A name without a promise, where it lives, and what is lost with it."""

    name: str
    library: str
    tested: str  # with this version
    home: str  # module, or module:Class
    file: str  # of the product
    without: str


TABLE = (
    Private("read_ray_address", "ray", "2.60", "ray._private.utils", "pipeline/runner/cluster/address.py",
            "a driver does not know the cluster that `ray start` left on this machine"),
    Private("GcsClient", "ray", "2.60", "ray._raylet", "pipeline/runner/cluster/address.py",
            "a cluster that does not answer is waited for as long as Ray likes"),
    Private("GcsLogSubscriber", "ray", "2.60", "ray._raylet", "pipeline/runner/monitor.py",
            "the log of a run has who died and with what in hand, not what they had written"),
    Private("_global_node", "ray", "2.60", "ray._private.worker", CONNECTION,
            "harmless lines of Ray's own are nowhere"),
    Private("get_ray_address_file", "ray", "2.60", "ray._private.utils", "pipeline/runner/cluster/session_folder.py",
            "a Ray that a command starts does not lie where RAY_TMPDIR or TMPDIR says"),
    Private("_global_node", "ray", "2.60", "ray._private.worker", "pipeline/runner/cluster/head.py",
            "a run whose head is lost ends after a minute without a word"),
    Private("_global_node", "ray", "2.60", "ray._private.worker", "pipeline/runner/cluster/disks.py",
            "nobody knows the folders of Ray on a node, nor whether their disk is full"),
    Private("get_num_cpus", "ray", "2.60", "ray._private.utils", "pipeline/runner/cluster/nodes.py",
            "a plan in a container reckons with the cores of the whole machine"),
    Private("get_system_memory", "ray", "2.60", "ray._private.utils", "pipeline/doctor/nodes.py",
            "the doctor takes the memory of a whole machine for that of a container"),
    Private("RayParams", "ray", "2.60", "ray._private.parameter", CONNECTION,
            "every command starts a monitor, and waits a second for it when it ends"),
    Private("start_api_server", "ray", "2.60", "ray._private.node:Node", CONNECTION,
            "every command starts a server without a page, and waits a second for it"),
    Private("get_dashboard_dependency_error", "ray", "2.60", "ray._private.utils", CONNECTION,
            "the agent of a command's own Ray imports what serves a dashboard, and measures each process all the time"),
    Private("set_kill_on_parent_death_linux", "ray", "2.60", "ray._private.utils", CONNECTION,
            "`timeout` and `kill 0` end a command's own Ray before the command, which then loses what it has finished"),
    Private("iter_internal_ref_bundles", "ray", "2.60", "ray.data:Dataset", "pipeline/runner/shards.py",
            "encoded videos would pass through the driver on their way to a writer"),
    Private("ActorClassID", "ray", "2.60", "ray.actor", "pipeline/runner/cluster/prefork/server.py",
            "forked workers draw the same ids, and abort where two of them use the object store at once"),
    Private("SETUP_WORKER_FILENAME", "ray", "2.60", "ray._private.ray_constants",
            "pipeline/runner/cluster/prefork/server.py", "every worker imports Ray twice, and all that it uses"),
    Private("get_memory_info_reply", "ray", "2.60", "ray._private.internal_api", "jobs/benchmark/pipeline_job.py",
            "the benchmark does not know what went through the object store"),
    Private("_new_shared", "torch", "2.13", "torch:UntypedStorage", "pipeline/datasets/packing.py",
            "packed batches are copied once more on their way out of a DataLoader's worker"),
    Private("PyThreadState_SetAsyncExc", "python", "3.11", "ctypes:pythonapi", "pipeline/runner/watchdog.py",
            "a driver that hangs in Ray Data cannot be freed"),
    Private("spawnv_passfds", "python", "3.11", "multiprocessing.util", "pipeline/video/fork_server.py",
            "every decoder imports torch once more, for its fork server"),
    Private("_attn_implementation", "transformers", "5.24", "transformers:PretrainedConfig",
            "gstep/language/layer_pruning.py", "FastV inside the language model does not know the shape of its mask"),
    Private("_attn_implementation", "transformers", "5.24", "transformers:PretrainedConfig",
            "gstep/backbones/gpu_forms.py", "a Qwen tower on a GPU does not know which attention it was built with"),
    Private("_addmm_activation", "torch", "2.13", "torch", "gstep/backbones/gpu_forms.py",
            "the kernels of a tower on a GPU are given up, with a warning, and torch's slower steps serve"),
    Private("_credentials", "botocore", "1.44", "botocore.signers:RequestSigner", "pipeline/storage/s3.py",
            "credentials that expired are not renewed within a request"),
    Private("_request_signer", "botocore", "1.44", "botocore.client:BaseClient", "pipeline/storage/s3.py",
            "credentials that expired are not renewed within a request"),
)  # fmt: skip
ANY = re.compile(r"\b(" + "|".join(sorted({one.name for one in TABLE})) + r")\b|\b(ray\._private|ray\._raylet)\b")


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_a_private_name_is_still_there(one):
    now = "" if one.library == "python" else f", {version(one.library)} is installed"
    module, _, kind = one.home.partition(":")
    home = importlib.import_module(module)
    if kind:
        home = getattr(home, kind)
    of_instances = re.findall(r"self\.(\w+)", inspect.getsource(home)) if inspect.isclass(home) else []
    there = hasattr(home, one.name) or one.name in of_instances
    assert there, f"{one.home}.{one.name} is gone ({one.library} {one.tested} had it{now}): {one.without}"


def test_the_table_has_each_file_that_uses_one_and_no_other():
    product = [file for room in ("gstep", "pipeline", "jobs") for file in (ROOT / room).rglob("*.py")]
    used = {file.relative_to(ROOT).as_posix() for file in product if ANY.search(file.read_text())}
    assert used == {one.file for one in TABLE}
    for one in TABLE:
        assert one.name in (ROOT / one.file).read_text(), one
