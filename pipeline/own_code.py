"""The code of a user's own class, a method or a decoder: a hash of it for identities, and its line that failed.

The hash is of the statements that the class depends on: its own, those of its base classes, and the functions, classes
and constants that they name, in the class's module and in other modules of the user. Comments, docstrings and layout
change nothing. This package, Python and other installed packages are no part of it, and neither is what code finds by a
computed name or reads from a file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from gstep.errors import WrongSelection

_NOT_OWN = frozenset({"gstep", "pipeline", "jobs", "torch", *sys.stdlib_module_names}) - {"__main__"}
_INSTALL_FOLDERS = ("/site-packages/", "/dist-packages/")
_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment"})  # fields of syntax nodes
_UNREADABLE = (OSError, LookupError, SyntaxError, ValueError, ImportError)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_own(kind: type) -> bool:
    """Return True if a class is the user's: no part of this package."""
    return kind.__module__.partition(".")[0] not in _NOT_OWN


def hash_code(kind: type) -> str:
    """Return ``blake2b:<hex>`` of the code of a class, the same on every machine that has the same statements.

    If the source cannot be read, as in some notebooks, it is of the bytecode, which depends on Python's version.
    """
    try:
        texts = _Sources(kind.__module__).texts(kind.__qualname__.partition(".")[0])
    except _UNREADABLE:
        texts = list(_bytecode(kind))
    return _digest("\n".join(texts).encode())


def file_of(kind: type) -> str:
    """Return the file of a class, or its module's name where there is none."""
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or f"module {kind.__module__}")


def locate_own_error(error: BaseException, kind: type) -> str | None:
    """Return FILE:LINE where a user's class is to blame for ``error``; None for any other error.

    It is the innermost frame in the user's code; for a wrong selection it is the method's ``select``.
    """
    if not is_own(kind):
        return None
    sources, place = _Sources(kind.__module__), None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if sources.is_own(str(frame.f_globals.get("__name__"))):
            place = f"{frame.f_code.co_filename}:{line}"
    if place is None and isinstance(error, WrongSelection):
        code: CodeType = kind.select.__code__  # type: ignore[attr-defined]
        place = f"{code.co_filename}:{code.co_firstlineno}"
    return place


class _Module:
    """The statements of a module by the names that they bind or change.

    Attributes:
        statements: name -> statements.
        imports: name that an import binds -> the dotted path that it stands for.
        stars: modules of which all names are imported.
    """

    def __init__(self, name: str, source: str) -> None:
        """Parse the module's ``source``; statements below ``if __name__ == "__main__"`` are left out.

        Raises SyntaxError.
        """
        self.name = name
        self.body = [node for node in ast.parse(source).body if not _runs_as_script(node)]
        self.statements: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, str] = {}
        self.stars: list[str] = []
        for node in self.body:
            if not isinstance(node, _DEFINITIONS):  # an import in a function binds no name of the module
                self.imports |= self.imported_in(node)
            for bound in _names_bound(node):
                self.statements.setdefault(bound, []).append(node)

    def imported_in(self, statement: ast.stmt) -> dict[str, str]:
        """Return the names that imports in a statement bind, and the dotted path that each stands for.

        For ``import *`` the imported module is added to ``stars`` instead.
        """
        names: dict[str, str] = {}
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                pairs = [(alias.asname, alias.name) for alias in node.names]
                names |= {asname: name for asname, name in pairs if asname}
                names |= {name.partition(".")[0]: name.partition(".")[0] for asname, name in pairs if not asname}
            elif isinstance(node, ast.ImportFrom):
                package = getattr(sys.modules.get(self.name), "__package__", None) or ""
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
                if "*" in names:
                    del names["*"]
                    self.stars.append(source)
        return names


class _Sources:
    """The modules of a user, read from their files when they are first needed; ``start`` is one of them."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._modules: dict[str, _Module] = {}

    def is_own(self, module: str) -> bool:
        """Return True if a module is the user's, as the first one is."""
        top, first = module.partition(".")[0], self._start.partition(".")[0]
        if module == self._start or top in _NOT_OWN:
            return module == self._start
        origin = _origin(module)
        return origin is not None and (top == first or not any(part in origin for part in _INSTALL_FOLDERS))

    def texts(self, name: str) -> list[str]:
        """Return the statements that ``name`` depends on, directly or not, in one fixed layout, sorted.

        ``name`` is looked up in the module that these sources start from. Statements of other modules count only if
        those modules are the user's. A module without source, such as an extension module, gives the hash of its file.
        Raises one of _UNREADABLE if the first module has no source, or does not bind ``name``.
        """
        if name not in self._read(self._start).statements:
            raise LookupError(name)
        waiting, visited, texts = [(self._start, name)], set[tuple[str, str]](), set[str]()
        while waiting:
            module_name, name_in_it = waiting.pop()
            if (module_name, name_in_it) in visited:
                continue
            visited.add((module_name, name_in_it))
            try:
                module = self._read(module_name)
            except _UNREADABLE:
                texts.add(f"{module_name}: {_file_hash(module_name)}")  # an extension module
                continue
            if name_in_it in module.imports:
                texts.add(f"{module.name}: {name_in_it} is {module.imports[name_in_it]}")
                waiting += [target for target in self._find(module.imports[name_in_it]) if target[1]]
            for statement in module.statements.get(name_in_it, []) if name_in_it else module.body:
                texts.add(f"{module.name}: {_canonical(statement)}")
                waiting += self._named_by(module, statement)
            waiting += [(star, name_in_it) for star in module.stars if self.is_own(star)]
        return sorted(texts)

    def _read(self, name: str) -> _Module:
        """Read a module's source once, and keep it. Raises one of _UNREADABLE."""
        if name not in self._modules:
            loader: Any = getattr(sys.modules.get(name), "__loader__", None) or getattr(_spec(name), "loader", None)
            source = loader.get_source(name) if hasattr(loader, "get_source") else None
            if source is None:
                raise LookupError(name)
            self._modules[name] = _Module(name, source)
        return self._modules[name]

    def _named_by(self, module: _Module, statement: ast.stmt) -> Iterator[tuple[str, str]]:
        """Yield (module, name) for each name that a statement uses and that a module of the user may bind."""
        own_imports = module.imported_in(statement)
        for root, *attributes in _chains(statement):
            if root in own_imports:
                yield from self._find(".".join([own_imports[root], *attributes]))
            elif root in module.imports:
                yield module.name, root
                yield from self._find(".".join([module.imports[root], *attributes]))
            else:
                yield module.name, root  # which may be a variable, or a name that a star imports

    def _find(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the (module, name) that a dotted path leads to; nothing if it is in no module of the user.

        The name "" is the whole module.
        """
        module, *attributes = path.split(".")
        if not self.is_own(module):
            return
        while attributes and _spec(f"{module}.{attributes[0]}") is not None:
            module = f"{module}.{attributes.pop(0)}"
        yield module, attributes[0] if attributes else ""


def _spec(module: str) -> Any:
    """Return the spec of a module that is loaded or can be found, or None. May import the packages above the module."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__spec__", None) or sys.modules[module]
    try:
        return importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 - it imports packages, which is running code of the user's
        return None


def _origin(module: str) -> str | None:
    """Return the file or folder that a module is read from; None for one without."""
    spec = _spec(module)
    folders = list(getattr(spec, "submodule_search_locations", None) or [])
    origin = getattr(spec, "origin", None) or getattr(spec, "__file__", None) or next(iter(folders), None)
    return origin if isinstance(origin, str) and "/" in origin else None


def _file_hash(module: str) -> str:
    """Return the hash of the file of a module without source, "" where there is none."""
    try:
        return _digest(Path(_origin(module) or "").read_bytes())
    except OSError:
        return ""


def _digest(data: bytes) -> str:
    """Return ``blake2b:<hex>`` of bytes."""
    return f"blake2b:{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _runs_as_script(node: ast.stmt) -> bool:
    """Return True if a statement is ``if __name__ == "__main__"``."""
    return isinstance(node, ast.If) and ["__name__"] in _chains(node.test)


def _names_bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds or changes, without the names of its imports.

    A call alone on a line, such as ``table.update(x=y)``, counts as a change of each name in it.
    """
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    names = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, _DEFINITIONS):
            names.add(inner.name)
        elif isinstance(inner, ast.Expr) or isinstance(getattr(inner, "ctx", None), ast.Store | ast.Del):
            names |= {root for root, *_ in _chains(inner)}
    return names


def _chains(node: ast.AST) -> list[list[str]]:
    """Return each name in the syntax below ``node`` with the attributes that follow it: ``a.b.c`` is [a, b, c]."""
    chains, waiting = list[list[str]](), [node]
    while waiting:
        inner = waiting.pop()
        root, attributes = inner, list[str]()
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        if isinstance(root, ast.Name):
            chains.append([root.id, *attributes])
        else:
            waiting += ast.iter_child_nodes(inner)
    return chains


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


def _bytecode(kind: type) -> Iterator[str]:
    """Yield as text the bytecode and plain attributes of a class whose source cannot be read, and of its bases.

    The functions and classes of the user that this code names follow, with the plain values of its global names.
    """
    sources, queue, visited = _Sources(kind.__module__), list[Any]([kind]), set[int]()
    while queue:
        item = queue.pop(0)
        if id(item) in visited or not sources.is_own(getattr(item, "__module__", None) or ""):
            continue
        visited.add(id(item))
        if isinstance(item, type):
            queue += item.__mro__
            for name, value in sorted(vars(item).items()):
                # A static or class method, or a property's getter, counts by its function.
                function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(function, FunctionType):
                    queue.append(function)
                elif isinstance(value, _PLAIN) and name not in ("__doc__", "__module__"):
                    yield f"{item.__qualname__}.{name} = {value!r}"
        elif isinstance(item, FunctionType):
            yield f"{item.__qualname__}: {item.__defaults__!r} {_code_text(item.__code__, item.__doc__)}"
            for name in sorted(_global_names(item.__code__)):
                value = item.__globals__.get(name)
                queue.append(value)
                if isinstance(value, _PLAIN) and name in item.__globals__:
                    yield f"{name} = {value!r}"


def _code_text(code: CodeType, docstring: str | None) -> str:
    """Return bytecode as text, without its docstring and lines."""
    consts = [_const_text(value) for value in code.co_consts if docstring is None or value != docstring]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _const_text(value: object) -> str:
    """Return a constant of bytecode as text that does not depend on the order of a set."""
    if isinstance(value, CodeType):
        return _code_text(value, None)
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _global_names(code: CodeType) -> Iterable[str]:
    """Return the names that bytecode and the functions in it use."""
    inner = (name for const in code.co_consts if isinstance(const, CodeType) for name in _global_names(const))
    return {*code.co_names, *inner}
