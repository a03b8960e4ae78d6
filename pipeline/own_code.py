"""The code of a user's own class, a method or a decoder: its hash, and the line of it that failed.

The hash covers every statement of the class's module and of the user's modules that this module imports, directly or
not. Comments, docstrings, layout, and what stands below ``if __name__ == "__main__"`` do not change it. This package,
Python, and other installed packages are not part of it, and neither are modules that code imports by a computed name
and files that it reads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from gstep.errors import WrongSelection
from pipeline.errors import UsageError

_NOT_OWN = frozenset({"gstep", "pipeline", "jobs", "torch", *sys.stdlib_module_names}) - {"__main__"}
_INSTALL_FOLDERS = ("/site-packages/", "/dist-packages/")
_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment"})  # fields of syntax nodes
_FORM = (
    "modules:"  # before a hash; hashes of versions before 2026-11-29 covered other statements, and have no such form
)


def is_own(kind: type) -> bool:
    """Return True if a class is the user's: no part of this package."""
    return kind.__module__.partition(".")[0] not in _NOT_OWN


def hash_code(kind: type) -> str:
    """Return ``modules:<hex>`` of the code of a class, the same on every machine that has the same statements.

    A module without source, such as an extension module, counts by the bytes of its file.

    Raises UsageError if the module of the class has no file, as in a notebook, or a module cannot be parsed.
    """
    if _find_file(kind.__module__) is None:
        raise UsageError(f"{kind.__module__}:{kind.__qualname__} is in no file: put the class into a module of its own")
    texts, waiting = dict[str, str](), [kind.__module__]
    while waiting:
        module = waiting.pop()
        if module in texts or not _is_users(module, kind.__module__):
            continue
        source = _read_source(module)
        if source is None:
            file = _find_file(module)
            texts[module] = hashlib.blake2b(file.read_bytes()).hexdigest() if file else ""
            continue
        try:
            statements = [node for node in ast.parse(source).body if not _runs_as_script(node)]
        except SyntaxError as error:
            raise UsageError(f"module {module}, line {error.lineno}: {error.msg}") from error
        texts[module] = _canonical(statements)
        waiting += _list_imports(module, statements)
    data = "\n".join(f"{module}: {texts[module]}" for module in sorted(texts)).encode()
    return f"{_FORM}{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def is_comparable(code: str | None) -> bool:
    """Return True if a stored hash can be compared with one of ``hash_code``; False for None and for older forms."""
    return code is not None and code.startswith(_FORM)


def file_of(kind: type) -> str:
    """Return the file of a class, or its module's name where there is none."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or f"module {kind.__module__}")


def locate_own_error(error: BaseException, kind: type) -> str | None:
    """Return FILE:LINE where a user's class is to blame for ``error``; None for any other error.

    It is the innermost frame in the user's code; for a wrong selection it is the method's ``select``.
    """
    if not is_own(kind):
        return None
    line_in_file = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_users(str(frame.f_globals.get("__name__")), kind.__module__):
            line_in_file = f"{frame.f_code.co_filename}:{line}"
    if line_in_file is None and isinstance(error, WrongSelection):
        code: CodeType = kind.select.__code__  # type: ignore[attr-defined]
        line_in_file = f"{code.co_filename}:{code.co_firstlineno}"
    return line_in_file


def _is_users(module: str, first: str) -> bool:
    """Return True if a module belongs to the user, whose module ``first`` is: it is no installed package."""
    top, first_top = module.partition(".")[0], first.partition(".")[0]
    if module == first or top in _NOT_OWN:
        return module == first
    file = _find_file(module)
    return file is not None and (top == first_top or not any(part in str(file) for part in _INSTALL_FOLDERS))


def _list_imports(module: str, statements: list[ast.stmt]) -> Iterator[str]:
    """Yield the modules that the import statements in a module may load, those in functions too.

    ``import a.b`` loads a and a.b. For ``from a import b``, a.b is yielded too: it may be a module.
    """
    package = getattr(sys.modules.get(module), "__package__", None)
    if package is None:
        package = (
            module if getattr(_find_spec(module), "submodule_search_locations", None) else module.rpartition(".")[0]
        )
    for node in (node for statement in statements for node in ast.walk(statement)):
        paths = list[str]()
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            paths = [f"{source}.{alias.name}" for alias in node.names]
        for path in paths:
            names = path.split(".")
            yield from (".".join(names[:length]) for length in range(1, len(names) + 1))


def _find_spec(module: str) -> Any:
    """Return the spec of a module that is loaded or can be found, or None. May import the packages above the module."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None) or sys.modules[module]
    try:
        return importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 - it imports packages, which is running code of the user's
        return None


def _find_file(module: str) -> Path | None:
    """Return the file that a module is read from; None for a module without one and for what is no module."""
    spec = _find_spec(module)
    origin = getattr(spec, "origin", None) or getattr(spec, "__file__", None)
    return Path(origin) if isinstance(origin, str) and "/" in origin else None


def _read_source(module: str) -> str | None:
    """Return the source of a module, or None if it has none."""
    loader: Any = getattr(sys.modules.get(module), "__loader__", None) or getattr(_find_spec(module), "loader", None)
    try:
        source: str | None = loader.get_source(module) if hasattr(loader, "get_source") else None
    except (ImportError, OSError):
        return None
    return source


def _runs_as_script(node: ast.stmt) -> bool:
    """Return True if a statement is ``if __name__ == "__main__"``."""
    return isinstance(node, ast.If) and any(getattr(inner, "id", None) == "__name__" for inner in ast.walk(node.test))


def _canonical(value: Any) -> str:
    """Return syntax as a text that layout, comments, docstrings and versions of Python do not change."""
    if isinstance(value, list):
        statements = [item for item in value if not _is_docstring(item)]
        return f"[{', '.join(map(_canonical, statements))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, part) for name, part in ast.iter_fields(value) if name not in _WITHOUT_MEANING]
    parts = [f"{name}={_canonical(part)}" for name, part in fields if part is not None and part != []]
    return f"{type(value).__name__}({', '.join(parts)})"


def _is_docstring(node: object) -> bool:
    """Return True if a statement is a text alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
