"""The package as a wheel: installed somewhere else, it runs there without the clone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.pipeline.caches import make_cache, random_tokens

pytestmark = pytest.mark.slow  # two runs of pip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed wheel, and nothing but it."""
    folder = tmp_path_factory.mktemp("wheel")
    clone, wheels, site = folder / "clone", folder / "wheels", folder / "site"
    clone.mkdir()
    for room in ("gstep", "pipeline", "jobs"):  # a build leaves files in the folder that it is made from
        shutil.copytree(ROOT / room, clone / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(wheels)], cwd=clone, check=True)
    (wheel,) = wheels.glob("gstep_cache-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(clone)
    return site


def command(site: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """``gstep-cache ARGV`` in a folder with a pipeline.py of the user's."""
    (folder / "pipeline.py").write_text("raise SystemExit('not ours')")
    return subprocess.run(
        [sys.executable, str(site / "bin" / "gstep-cache"), *argv],
        cwd=folder,
        env={"PYTHONPATH": str(site), "HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_everything_of_the_package_is_in_it(site):
    """Also what is no Python: templates, typing marks, the checkpoint that comes with it; but no pages to read."""
    listed = {
        file.relative_to(ROOT).as_posix()
        for room in ("gstep", "pipeline", "jobs")
        for file in (ROOT / room).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in {".md", ".png", ".ipynb"}
    }
    assert len(listed) > 300
    assert sorted(name for name in listed if not (site / name).is_file()) == []


def test_the_console_script_runs_where_a_file_has_the_name_of_the_package(site, tmp_path):
    make_cache(tmp_path / "cache", {"v.mp4": random_tokens(0)})
    said = command(site, tmp_path, "inspect", "cache", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["n_ok"] == 1
    said = command(site, tmp_path, "inspect", "cache", "v.mp4", "--html", "page.html")
    assert said.returncode == 0 and "<svg" in (tmp_path / "page.html").read_text(), said.stderr
    said = command(site, tmp_path, "prune", str(tmp_path / "missing.mp4"))
    assert said.returncode == 2 and "no such folder, file or manifest" in said.stderr
    assert command(site, tmp_path, "--version").stdout.startswith("gstep-cache 0.")


def test_the_checkpoint_that_comes_with_it_is_found(site, tmp_path):
    code = (
        "import gstep, sys; from gstep.checkpoints.source import ModelSource; s = ModelSource.resolve('shapes')"
        "; print(gstep.__file__, s.identity, s.weight_files)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{site}/gstep/__init__.py shapes:") and "model.safetensors" in done.stdout
