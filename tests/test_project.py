"""The house rules: rooms, types, style."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

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


HEAVY = {"torch", "transformers", "ray", "pyarrow", "av", "decord", "triton"}


@pytest.mark.parametrize(
    "modules",
    [
        {
            "gstep": HEAVY,
            "gstep.backbones.preprocess": {"torch", "transformers"},  # travels to every decoder
            "jobs.prune": {"torch", "ray", "pyarrow", "transformers", "av", "decord"},
            "jobs.generate": {"torch", "ray", "pyarrow", "transformers", "av", "decord"},
            "pipeline.prune.config": {"torch", "ray", "pyarrow", "transformers"},
            # What Ray's workers load each time one starts: decoders and writers never touch a tensor.
            "pipeline.runner.worker_heartbeat": {"torch", "transformers", "av", "pyarrow", "ray.data"},
            "pipeline.prune.write_stage": {"torch", "transformers", "av", "ray.data"},
            "pipeline.prune.decode_stage": {"torch", "transformers", "ray.data"},
        },
        {
            "gstep.pruners": HEAVY - {"torch"},
            "gstep.backbones": {"transformers", "ray", "pyarrow"},
            "pipeline.cache.reader": {"transformers", "ray", "av", "decord"},
        },
    ],
    ids=["without-torch", "with-torch"],
)
def test_importing_stays_light(modules):
    """In one process, the lightest first: a module that loads too much shows in its line and in later ones."""
    code = "import importlib, sys\n"
    code += f"for name, absent in {modules!r}.items():\n"
    code += "    importlib.import_module(name)\n    print(name, *sorted(absent & set(sys.modules)))"
    assert run(sys.executable, "-c", code).stdout.split("\n")[:-1] == list(modules)
