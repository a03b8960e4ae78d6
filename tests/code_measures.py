"""Measure the code of the product: ``python -m tests.code_measures`` prints what ``tests/test_floors.py`` holds.

A line of code holds something beside comments and docstrings. Product are gstep, pipeline and jobs; tests are counted
beside them.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.paths import ROOT

PRODUCT = ("gstep", "pipeline", "jobs")
GROWING = {"gstep/pruners"}  # folders that are a table, a file a method
EXCUSED = {"kernels.py"}  # Triton compiles a kernel as one function
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
ANYTHING = {"Any", "object"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
#: First words of docstrings that say what a function does.
VERBS = frozenset((ROOT / "tests" / "verbs.txt").read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class Source:
    """A Python file of the repository."""

    path: Path

    @property
    def room(self) -> str:
        return self.path.parts[0]

    @property
    def folder(self) -> str:
        return self.path.parent.as_posix()

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def n_lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> set[int]:
        return _code_lines(self.text, self.nodes)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the functions and methods, nested ones too."""
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def sources() -> list[Source]:
    """Find the Python files that git knows, or all where there is no git."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = listed.stdout.split() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py")]
    paths = (Path(name) for name in found)
    return [Source(path) for path in paths if path.parts[0] in (*PRODUCT, "tests") and (ROOT / path).is_file()]


def measures(files: list[Source]) -> dict[str, tuple[int, str]]:
    """Return each number that may only fall, with the place where it is reached or "" for a sum."""
    product = [file for file in files if file.room in PRODUCT]
    modules = Counter(file.folder for file in product if file.path.name != "__init__.py")
    folder = max((name for name in modules if name not in GROWING), key=lambda name: modules[name])
    longest = max(product, key=lambda file: file.n_lines)
    functions = [
        (len(file.code_lines & set(range(node.lineno, (node.end_lineno or 0) + 1))), f"{file.path}:{node.name}")
        for file in product
        if file.path.name not in EXCUSED
        for node in file.functions()
    ]
    functions_of_product = (node for file in product for node in file.functions() if not _is_property(node))
    documented = [text for node in functions_of_product if (text := ast.get_docstring(node))]
    return {
        "modules in a folder": (modules[folder], folder),
        "lines of a file": (longest.n_lines, str(longest.path)),
        "lines of code of a function": max(functions),
        "mappings of Any or object": (_mappings_of_anything(product), ""),
        "mentions of Any": (sum(_is_any(node) for file in product for node in file.nodes), ""),
        "docstrings of functions without a verb": (sum(text.split()[0] not in VERBS for text in documented), ""),
    }


def lines_of_code(files: list[Source]) -> dict[str, int]:
    """Count lines of code by room."""
    return {room: sum(len(file.code_lines) for file in files if file.room == room) for room in (*PRODUCT, "tests")}


def _code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    """Return the numbers of the lines that hold code: some token, which is no comment and no part of a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = [
        node.body[0] for node in nodes if isinstance(node, documented) and ast.get_docstring(node) is not None
    ]
    return lines - {n for text in docstrings for n in range(text.lineno, (text.end_lineno or text.lineno) + 1)}


def _mappings_of_anything(files: list[Source]) -> int:
    """Count annotations that are a mapping to Any or object, and names that stand for one."""
    aliases = {
        target.id
        for file in files
        for node in file.tree.body
        if isinstance(node, ast.Assign) and _is_mapping_of_anything(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    nodes = [node for file in files for node in file.nodes]
    named = sum(isinstance(node, ast.Name) and node.id in aliases for node in nodes)
    return named + sum(_is_mapping_of_anything(node) for node in nodes)


def _is_mapping_of_anything(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in MAPPINGS
        and isinstance(node.slice, ast.Tuple)
        and any(isinstance(part, ast.Name) and part.id in ANYTHING for part in ast.walk(node.slice.elts[-1]))
    )


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a property, whose docstring is a noun phrase."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_any(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "Any"


if __name__ == "__main__":
    found = sources()
    for room, number in lines_of_code(found).items():
        sys.stdout.write(f"{number:7,}  lines of code in {room}\n")
    for what, (number, where) in measures(found).items():
        sys.stdout.write(f"{number:7,}  {what}{f' ({where})' if where else ''}\n")
