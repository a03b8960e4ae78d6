"""The Dockerfiles, by hadolint, and their locks, which must hold all that the package asks for."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

CLUSTER = ROOT / "jobs" / "cluster"
IMAGES = {"prune": ("cluster", "s3"), "serve": ("cluster", "s3", "vllm")}
LINE = re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}")
LINUX = {"platform_machine": "x86_64", "sys_platform": "linux", "python_version": "3.11", "extra": ""}


def lint(file):
    hadolint = Path(sys.executable).with_name("hadolint")
    return subprocess.run([str(hadolint), "--no-color", file], capture_output=True, text=True, check=False)


def locked(name):
    lines = (ROOT / ".ci" / f"requirements-{name}.lock").read_text().splitlines()[1:]
    return {canonicalize_name(found[1]): found[2] for line in lines if (found := LINE.fullmatch(line))}, len(lines)


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name):
    done = lint(CLUSTER / f"{name}.Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_something_elsewhere(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN pip install ray\n")
    assert lint(tmp_path / "Dockerfile").returncode == 1


@pytest.mark.parametrize("name", IMAGES)
def test_a_lock_has_what_the_package_asks_for(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions, n_lines = locked(name)
    assert len(versions) == n_lines > 60
    extras = [line for extra in IMAGES[name] for line in project["optional-dependencies"][extra]]
    wanted = [Requirement(line) for line in (*project["dependencies"], *extras)]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate(LINUX)]
    assert len(here) > 10
    wrong = [str(one) for one in here if not one.specifier.contains(versions.get(canonicalize_name(one.name), "0"))]
    assert not wrong, "make the locks again: .ci/image-locks"


def test_what_prunes_in_an_image_is_what_was_tested():
    tested = dict(
        line.split("==") for line in (ROOT / ".ci/requirements.lock").read_text().splitlines() if "==" in line
    )
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    versions, _ = locked("prune")
    both = (versions.keys() & tested.keys()) - {"triton"}  # torch pins that itself
    assert len(both) > 60
    assert {name: versions[name] for name in both} == {name: tested[name] for name in both}


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_the_python_and_the_files_that_its_lock_is_for(name):
    text = (CLUSTER / f"{name}.Dockerfile").read_text()
    assert "FROM python:3.11-" in text
    copied = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert copied == [f".ci/requirements-{name}.lock", "."]


def test_a_build_gets_the_package_and_no_cache():
    """As Docker reads the file: the last line that fits a path decides."""
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    rooms = {"gstep", "jobs", "pipeline", "pyproject.toml", "README.md", "LICENSE"}
    assert sent == rooms | {".ci/requirements-*.lock"}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
