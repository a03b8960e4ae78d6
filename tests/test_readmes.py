"""The pages: every block runs as pasted, in one folder, page after page, and prints what the page shows."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from ray._private import auto_init_hook

from tests.builders.clusters import ray_here
from tests.builders.runs import environment
from tests.jobs.faults import begin_forked, fork
from tests.paths import ROOT

#: In the order of reading: later pages use what earlier ones made.
PAGES = ("README.md", "gstep/README.md", "pipeline/cache/README.md", "pipeline/prune/README.md")
PAGES += ("pipeline/generate/README.md", "pipeline/verify/README.md", "pipeline/evaluate/README.md")
FOLDERS = ("pipeline", "pipeline/plan", "pipeline/inputs", "pipeline/evaluate/shapes", "pipeline/evaluate/tasks")
FOLDERS += ("jobs/benchmark", "jobs/cluster", "tests")
OTHERS = [*(f"{folder}/README.md" for folder in FOLDERS)]
OTHERS += [f".github/{name}.md" for name in ("CONTRIBUTING", "RELEASING", "CHANGELOG")]
#: What stands in a comment before a block that is not pasted here, or not as it is.
MARKS = {
    "needs a hub", "needs a cluster", "needs S3", "needs vLLM", "needs lmms-eval", "needs vLLM and lmms-eval",
    "test command", "a file", "output",
}  # fmt: skip
FIRST = "first command"
FENCE = re.compile(r"(?:<!-- ([^>]+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
EACH_PAGE = pytest.mark.parametrize("page", [*PAGES, *OTHERS])
COMMAND = re.compile(r"^(python -m (?:.*\\\n)*.*\n)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)|src=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block: the comment before it, its language, its text."""

    mark: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """In order; of the command that installs, what comes after that."""
    found = [Block(*match.groups(default="")) for match in FENCE.finditer((ROOT / page).read_text())]
    return [replace(one, text=one.text.rpartition(".venv/bin/")[2]) if one.mark == FIRST else one for one in found]


def shape(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, bars, spaces."""
    return [" ".join(re.sub(r"[\d.,]+|[━╸╺─]+", "#", line).split()) for line in text.splitlines() if line.strip()]


def pasted(block: Block, folder: Path, log: Path, **environ: str) -> str:
    """What a block prints where the environment was activated.

    Python runs in processes forked from one that has the imports, but for the first command.
    """
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = environment(**environ)
    bash = block.language == "bash"
    for part in COMMAND.split(block.text) if bash and block.mark != FIRST else [block.text]:
        if block.mark != FIRST and (not bash or COMMAND.fullmatch(part)):
            argv = shlex.split(part.replace("\\\n", ""), comments=True)[2:] if bash else ["-"]
            process = fork(run_python, argv, part, folder, str(log), inherited)
            process.join()
            code = process.exitcode
        else:
            options = {"cwd": folder, "env": inherited, "stderr": subprocess.STDOUT}
            with log.open("ab") as out:
                code = subprocess.call(["bash", "-euo", "pipefail", "-c", part], stdout=out, **options)
        assert code == 0, f"{part}\n{log.read_text()}"
    return log.read_text()


def run_python(argv: list[str], source: str, folder: Path, log: str, environ: dict[str, str]) -> None:
    """Be ``python -m <argv>``, or ``python -`` with a source."""
    os.chdir(folder)
    begin_forked(log, environ)
    sys.path.insert(0, "")
    sys.argv = argv
    auto_init_hook.enable_auto_connect = True  # as where the tests do not forbid it
    if argv == ["-"]:
        exec(compile(source, "<stdin>", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        sys.modules.pop(argv[0], None)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


@pytest.fixture(scope="module")
def address():
    """A Ray that all commands join: starting one for each takes half of their time."""
    with ray_here({"num_cpus": 2}):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pasted")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs_as_pasted(page, folder, address, tmp_path):
    ran = 0
    for block, after in pairwise([*blocks(page), Block("", "", "")]):
        if block.mark not in ("", FIRST) or block.language not in ("bash", "python"):
            continue
        printed = pasted(block, folder, tmp_path / str(ran), RAY_ADDRESS=address)
        ran += 1
        if after.mark == "output":
            missing = [line for line in shape(after.text) if line not in shape(printed)]
            assert not missing, f"{block.text}\nprinted\n{printed}\nand the page shows\n{after.text}"
    assert ran


@pytest.mark.slow
def test_git_ignores_what_the_blocks_made(folder):
    """They ran above, in this folder instead of a clone; of one page alone this is what that page made."""
    made = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    shutil.copy(ROOT / ".gitignore", folder)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    status = ["git", "status", "--porcelain", "--ignored"]
    told = subprocess.run(status, cwd=folder, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in made if name not in told] == []
    assert told.count("??") == 1 and ".gitignore" in told  # all but that file is ignored


@EACH_PAGE
def test_what_is_not_pasted_says_why(page):
    assert {block.mark for block in blocks(page)} <= MARKS | {"", FIRST}
    assert all(block.language or block.text.startswith((" ", "cache.json", "tests/")) for block in blocks(page))


@EACH_PAGE
def test_links_lead_somewhere(page):
    for file, anchor, picture in LINK.findall((ROOT / page).read_text()):
        target = file or picture
        if target.startswith("http"):
            continue
        place = (ROOT / page).parent / target if target else ROOT / page
        assert place.exists(), f"{page}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor[1:] in slugs, f"{page}: {target}{anchor}"


@EACH_PAGE
def test_commands_and_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    for module in set(re.findall(r"python -m (jobs\.\w+)", text)):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text))
    places = ("", "tests", "gstep", str(Path(page).parent))
    missing = {name for name in named if not any((ROOT / place / name).is_file() for place in places)}
    examples = {"gstep/backbones/patches.py", "gstep/language/patches.py", "gstep/pruners/mine.py"}
    assert missing <= examples | {"tests/gstep/pruners/test_mine.py"}
