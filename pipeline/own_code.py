"""The code of a user's class, such as a method or a decoder: its hash, and the line of it that failed.

The hash covers the statements of the class's module and of the user's modules that it imports, directly or indirectly.
It ignores comments, docstrings, layout, and ``if`` statements of a module that mention ``__name__``. It does not cover
installed packages, modules that are imported by a computed name, or data files.
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


def is_user_class(kind: type) -> bool:
    """Return True if the class is not defined in this project, torch or the standard library."""
    return kind.__module__.partition(".")[0] not in _NOT_OWN


def hash_code(kind: type) -> str:
    """Hash the code of a user's class; machines with the same statements compute the same hash.

    A module without source, such as an extension module, is hashed by the bytes of its file. Locating a module may
    import the packages that contain it.

    Returns:
        ``modules:<hex>``.

    Raises:
        UsageError: the class is not in a file, as in a notebook, or a module has a syntax error.
    """
    if _find_file(kind.__module__) is None:
        raise UsageError(f"{kind.__module__}:{kind.__qualname__} is in no file: put the class into a module of its own")
    texts, waiting = dict[str, str](), [kind.__module__]
    while waiting:
        module = waiting.pop()
        if module in texts or not _is_user_module(module, kind.__module__):
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
        texts[module] = _render_canonically(statements)
        waiting += _list_imports(module, statements)
    data = "\n".join(f"{module}: {texts[module]}" for module in sorted(texts)).encode()
    return f"{_FORM}{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def is_comparable(code: str | None) -> bool:
    """Return True if a stored hash was made by the rules of ``hash_code``; older versions had others."""
    return code is not None and code.startswith(_FORM)


def find_class_file(kind: type) -> str:
    """Return the path of the file that defines a class, or "module NAME" if its module has no file."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or f"module {kind.__module__}")


def locate_user_error(error: BaseException, kind: type) -> str | None:
    """Find the line of the user's code that is to blame for an error.

    It is the innermost frame of the traceback that lies in the user's modules. If there is none and ``error`` is a
    WrongSelection, it is the first line of the method's ``select``.

    Returns:
        FILE:LINE, or None if the class ``kind`` is not the user's or its code is not involved.
    """
    if not is_user_class(kind):
        return None
    line_in_file = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_user_module(str(frame.f_globals.get("__name__")), kind.__module__):
            line_in_file = f"{frame.f_code.co_filename}:{line}"
    if line_in_file is None and isinstance(error, WrongSelection):
        code: CodeType = kind.select.__code__  # type: ignore[attr-defined]
        line_in_file = f"{code.co_filename}:{code.co_firstlineno}"
    return line_in_file


def _is_user_module(module: str, first: str) -> bool:
    """Return True if the user wrote ``module``, where ``first`` is the module of the user's class.

    Such a module has a file, and is in the same top-level package as ``first`` or not installed in site-packages.
    """
    top, first_top = module.partition(".")[0], first.partition(".")[0]
    if module == first or top in _NOT_OWN:
        return module == first
    file = _find_file(module)
    return file is not None and (top == first_top or not any(part in str(file) for part in _INSTALL_FOLDERS))


def _list_imports(module: str, statements: list[ast.stmt]) -> Iterator[str]:
    """Yield the names of all modules that import statements of a module may load, also statements in functions.

    ``import a.b`` loads a and a.b. For ``from a import b``, a.b is yielded too, although it may not be a module.
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
    """Find the import spec of a module, or the module itself if it is loaded without one; None if it cannot be found.

    This may import the packages that contain it, which runs user code; any exception gives None.
    """
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None) or sys.modules[module]
    try:
        return importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 - it imports packages, which is running code of the user's
        return None


def _find_file(module: str) -> Path | None:
    """Return the file that a module is loaded from; None if it cannot be found."""
    spec = _find_spec(module)
    origin = getattr(spec, "origin", None) or getattr(spec, "__file__", None)
    return Path(origin) if isinstance(origin, str) and "/" in origin else None


def _read_source(module: str) -> str | None:
    """Return the source text of a module, or None if it has none or cannot be read."""
    loader: Any = getattr(sys.modules.get(module), "__loader__", None) or getattr(_find_spec(module), "loader", None)
    try:
        source: str | None = loader.get_source(module) if hasattr(loader, "get_source") else None
    except (ImportError, OSError):
        return None
    return source


def _runs_as_script(node: ast.stmt) -> bool:
    """Return True if a statement is an ``if`` whose condition mentions ``__name__``."""
    return isinstance(node, ast.If) and any(getattr(inner, "id", None) == "__name__" for inner in ast.walk(node.test))


def _render_canonically(value: Any) -> str:
    """Render syntax nodes as text that does not depend on layout, comments, docstrings or the Python version."""
    if isinstance(value, list):
        statements = [item for item in value if not _is_docstring(item)]
        return f"[{', '.join(map(_render_canonically, statements))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, part) for name, part in ast.iter_fields(value) if name not in _WITHOUT_MEANING]
    parts = [f"{name}={_render_canonically(part)}" for name, part in fields if part is not None and part != []]
    return f"{type(value).__name__}({', '.join(parts)})"


def _is_docstring(node: object) -> bool:
    """Return True if a statement is only a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
