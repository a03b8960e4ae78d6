"""Break the product on purpose, a line at a time, and see that its tests notice: ``python -m tests.mutants``.

``tests/mutants.txt`` has four lines a mutant: the file, a line that stands once in it, the same line broken, and the
tests that must fail for it (the quick ones of them, where there are any). ``--draw N`` prints N more, each tried
against the tests that mirror its file. A mutant whose line is gone is reported: draw another one in its place.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from tests.code_measures import PRODUCT, Source, sources
from tests.paths import ROOT

LIST = ROOT / "tests" / "mutants.txt"
_SWAPS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+"},
    **{"and": "or", "or": "and", "not": "", "min": "max", "max": "min", "True": "False", "False": "True"},
}


@dataclass(frozen=True)
class Mutant:
    """A line of the product, broken, and the tests that must notice."""

    file: str
    line: str
    broken: str
    tests: str

    def __str__(self) -> str:
        return "\n".join([self.file, self.line, self.broken, self.tests])


def listed() -> list[Mutant]:
    """Read the committed mutants."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [Mutant(*lines[i : i + 4]) for i in range(0, len(lines), 5)]


def dies(mutant: Mutant, copy: Path) -> bool | None:
    """Run a mutant's tests in a copy of the repository; None where its line stands there no longer, or twice."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.splitlines().count(mutant.line) != 1:
        return None
    path.write_text(text.replace(f"{mutant.line}\n", f"{mutant.broken}\n", 1), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *mutant.tests.split()]
    try:
        done = subprocess.run([*command, "-m", "not slow"], cwd=copy, capture_output=True, timeout=300, check=False)
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:  # all are slow
            done = subprocess.run(command, cwd=copy, capture_output=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return True  # what no longer ends is noticed
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode in (0, 1, 2), done.stdout.decode()[-2000:]
    return done.returncode != 0


def drawn(seed: int) -> Iterator[Mutant]:
    """Yield mutants of product lines whose file has tests of its name, in an order that ``seed`` gives."""
    found = []
    for file in sources():
        tests = Path("tests") / file.path.with_name(f"test_{file.path.name}")
        if file.room in PRODUCT and (ROOT / tests).is_file():
            found += [Mutant(str(file.path), line, broken, str(tests)) for line, broken in _broken_lines(file)]
    random.Random(seed).shuffle(found)
    yield from found


def _broken_lines(file: Source) -> Iterator[tuple[str, str]]:
    """Yield each line that stands once in a file, with one of its operators or words changed for another."""
    lines = file.text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        (number, start), (_, end) = token.start, token.end
        line = lines[number - 1] if token.string in _SWAPS else ""
        if not line or line.startswith("@") or lines.count(line) != 1:
            continue
        broken = line[:start] + _SWAPS[token.string] + line[end:]
        try:
            ast.parse(file.text.replace(line, broken, 1))
        except SyntaxError:
            continue
        yield line, broken


def main() -> int:
    """Try the committed mutants, or draw others; the exit code is 1 where one lives or its line is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".mypy_cache"))
        if args.draw:
            dead = (mutant for mutant in drawn(args.seed) if dies(mutant, copy))
            for mutant in islice(dead, args.draw):
                print(mutant, end="\n\n", flush=True)
            return 0
        fates = {}
        for mutant in listed():
            fates[mutant] = fate = dies(mutant, copy)
            if not fate:
                print("lives" if fate is False else "its line is gone", mutant, sep=":\n", end="\n\n", flush=True)
    print(f"{sum(map(bool, fates.values()))} of {len(fates)} mutants die")
    return 0 if all(fates.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
