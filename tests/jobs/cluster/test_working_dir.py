"""What ``ray job submit --working-dir .`` takes along from a clone in which people have worked."""

import shutil
import subprocess
import zipfile

import pytest
from ray._private.runtime_env.packaging import create_package

from tests.paths import ROOT

LEFT_BEHIND = {
    "my-cache/tokens/a.parquet": 150 * 2**20,
    "videos/a.mp4": 2**20,
    "results/table.html": 2**20,
    ".venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so": 2**30,
    "bikes.html": 2**20,
    "shard-000.tar": 2**20,
    "gstep/__pycache__/types.pyc": 2**20,
}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """The names and the size of the package that Ray makes of a clone with all these in it."""
    clone = tmp_path_factory.mktemp("clone") / "gstep-cache"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split("\0")[:-1]:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    for name, size in LEFT_BEHIND.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        with (clone / name).open("wb") as file:
            file.truncate(size)
    (clone / "settings.yaml").write_text("{}")
    (clone / "mine.py").write_text("")
    target = clone.parent / "package.zip"
    create_package(str(clone), target, include_gitignore=True)
    with zipfile.ZipFile(target) as held:
        names = {name for name in held.namelist() if not name.endswith("/")}
    return names, target.stat().st_size, set(tracked.split("\0")[:-1])


def test_the_package_is_small_whatever_lies_in_the_clone(packaged):
    names, size, _ = packaged
    assert not names & LEFT_BEHIND.keys()
    assert size < 20 * 2**20, "Ray takes 100 MiB at most"


def test_all_of_the_four_rooms_and_what_lies_beside_them_goes_along(packaged):
    names, _, tracked = packaged
    rooms = {name for name in tracked if name.split("/")[0] in ("gstep", "jobs", "pipeline", "tests")}
    assert len(rooms) > 300
    assert names >= rooms | {"pyproject.toml", "README.md", "settings.yaml", "mine.py"}
