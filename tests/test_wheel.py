"""The package as a wheel: installed somewhere else, it runs there without the clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pipeline import TokenCache
from tests.builders.clips import sample
from tests.builders.runs import ALONE, environment
from tests.interpreter import run_python
from tests.jobs.test_own_method import CODE
from tests.paths import ROOT, python_path

pytestmark = pytest.mark.slow  # two runs of pip
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


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
    subprocess.run([*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(wheels)], cwd=clone, check=True)
    (wheel,) = wheels.glob("gstep_cache-*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(clone)
    return site


def test_everything_of_the_package_is_in_it(site):
    """Also what is no Python: templates, typing marks, the checkpoint that comes with it; but no pages to read."""
    listed = {
        file.relative_to(ROOT).as_posix()
        for room in ("gstep", "pipeline", "jobs")
        for file in (ROOT / room).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in {".md", ".png", ".svg", ".ipynb"}
    }
    assert len(listed) > 300
    assert sorted(name for name in listed if not (site / name).is_file()) == []


def test_a_project_with_packages_of_the_same_names_prunes_by_a_method_of_its_own(site, tmp_path):
    """By the console script, which finds ``mine.py`` here and this package elsewhere; Ray's workers do too."""
    for name in ("pipeline", "jobs", "gstep"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "mine.py").write_text(CODE[0])
    argv = ["prune", str(sample("bikes.mp4")), "--out", "c", "--pruner", "mine:Mine", "--num-frames", "3"]
    argv += ["--retention-ratio", "20%"]
    environ = environment(PYTHONPATH=python_path(site), HOME=str(tmp_path), **ALONE)
    done = run_python(site / "bin" / "gstep-cache", *argv, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "look inside: python -m jobs.inspect c" in done.stdout
    assert len(TokenCache(tmp_path / "c").get("bikes.mp4").tokens) == 3 * 196 // 5


@pytest.mark.parametrize("editable", [False, True])
def test_folders_of_the_same_names_that_are_no_packages_hide_neither_code_nor_checkpoint(site, tmp_path, editable):
    """Also where the clone is installed with ``pip install -e``."""
    if editable:
        shutil.copytree(site, tmp_path / "clone", ignore=shutil.ignore_patterns("bin", "*.dist-info"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path / "clone")
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(tmp_path / "site")]
        subprocess.run([*PIP, "install", *options, "-e", "."], cwd=tmp_path / "clone", check=True)
        site = tmp_path / "site"
    for name in ("pipeline", "jobs"):
        (tmp_path / "project" / name).mkdir(parents=True)
    others = f"sys.path.append({sysconfig.get_path('purelib')!r})"  # the packages that commands import
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); {others}; import jobs, pipeline; print(pipeline.__file__)\n"
    )
    code += "from gstep.checkpoints.source import ModelSource; print(ModelSource.resolve('shapes').file('config.json'))"
    done = run_python("-S", "-c", code, cwd=tmp_path / "project", env={})
    place = tmp_path / "clone" if editable else site
    file, checkpoint = done.stdout.splitlines()
    assert file == f"{place}/pipeline/__init__.py" and checkpoint.startswith(f"{place}/gstep/"), done.stderr
