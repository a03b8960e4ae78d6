"""Methods from outside the package: as an object, or by the import path of their class."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import gstep
from gstep.pruners import find_method, get_method_name
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.gstep import GSTEP
from tests.gstep.synthetic import assert_same, video


@dataclass(frozen=True, kw_only=True)
class Last(Pruner):
    """The last B tokens."""

    name: ClassVar[str] = "last"
    nested: ClassVar[bool] = True

    skip: int = 0

    def select(self, visual: gstep.VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        n_total = visual.tokens.shape[0] * visual.tokens.shape[1]
        return Selection(torch.arange(n_total).flip(0).roll(-self.skip)[:budget])


LAST = f"{__name__}:Last"


def test_an_object_and_a_path_are_the_same_method() -> None:
    tokens = video(5, 13, 8)
    own = gstep.prune(tokens, 0.2, Last(skip=2))
    assert own.index.tolist() == list(range(50, 63))
    assert_same(gstep.prune(tokens, 0.2, LAST, skip=2), own)
    assert_same(gstep.prune(tokens, 0.5, method=Last(skip=2)).at(0.2), own)
    assert gstep.prune(tokens, 0.2, GSTEP(alpha=1)).index.tolist() == gstep.prune(tokens, 0.2, alpha=1).index.tolist()


def test_a_method_is_found_again_by_what_names_it() -> None:
    assert get_method_name(Last) == LAST
    for name, kind in gstep.PRUNERS.items():
        assert get_method_name(kind) == name
        assert get_method_name(find_method(f"{kind.__module__}:{kind.__qualname__}")) == name
    with pytest.raises(ValueError, match="alpha: an object of gstep has its parameters: pass them to its class"):
        gstep.prune(video(2, 3, 4), method=GSTEP(), alpha=0.5)
    with pytest.raises(ValueError, match=r"Last is a class: pass an object, Last\(\.\.\.\), or its path"):
        gstep.prune(video(2, 3, 4), method=Last)  # type: ignore[arg-type]


PREAMBLE = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from gstep.pruners.base import Pruner, Selection

@dataclass(frozen=True, kw_only=True)
class Whole(Pruner):
    name: ClassVar[str] = "whole"
    nested: ClassVar[bool] = True

    def select(self, visual, budget, ratio, seed):
        return Selection(torch.arange(budget))
"""
FROZEN = "@dataclass(frozen=True)\n"
NAMED, ORDERED, SELECTS = 'name: ClassVar[str] = "n"', "nested: ClassVar[bool] = True", "select = Whole.select"
BROKEN = {
    "Absent": ("", "AttributeError.*importable on every machine"),
    "NoPruner": ("class NoPruner: ...", "is not a subclass of gstep.pruners.base.Pruner"),
    "Abstract": (f"{FROZEN}class Abstract(Pruner): {NAMED}; {ORDERED}", "is abstract: it does not define select"),
    "Plain": ("class Plain(Whole):\n    p: int = 3", "is not a dataclass: put @dataclass"),
    "Nameless": (f"{FROZEN}class Nameless(Pruner): {ORDERED}; {SELECTS}", r"does not declare name: ClassVar\[str\]"),
    "Orderless": (f"{FROZEN}class Orderless(Pruner): {NAMED}; {SELECTS}", r"does not declare nested: ClassVar\[bool\]"),
    "Made": (
        "def make():\n    class Made(Whole): ...\n    return dataclass(frozen=True)(Made)\nMade = make()",
        "locals",
    ),
    "Import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "Raises": ("1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_method_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, why = BROKEN[name]
    module = f"own_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(PREAMBLE + code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"(?s)'{module}:.*{why}"):
        gstep.prune(video(2, 3, 4), method=f"{module}:{name}")


def test_a_path_that_leads_nowhere_is_refused() -> None:
    for path in ("no_such_module:Mine", "tests:", ":Mine", "os:path.join", "a:b:c"):
        with pytest.raises(ValueError, match=f"method '{re.escape(path)}' "):
            gstep.make_pruner(path)


@dataclass(frozen=True, kw_only=True)
class Wrong(Pruner):
    """A method that returns what it is told of a video of 12 tokens [2,6,4], of which 3 are to be kept."""

    name: ClassVar[str] = "wrong"
    nested: ClassVar[bool] = False

    returned: Any = None

    def select(self, visual: gstep.VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        return self.returned


@dataclass(frozen=True, kw_only=True)
class WrongInNumber(Wrong):
    exact: ClassVar[bool] = False


THREE = torch.arange(3)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "a Selection; got NoneType"),
        (Selection([0, 1, 2]), r"index as a tensor \[3\]; got list"),  # type: ignore[arg-type]
        (Selection(THREE[None]), r"index as a tensor \[3\]; got \[1, 3\]"),
        (Selection(THREE - 1), r"different indices in \[0, 12\)"),
        (Selection(THREE + 10), r"different indices in \[0, 12\)"),
        (Selection(torch.tensor([4, 2, 4])), r"different indices in \[0, 12\)"),
        (Selection(THREE, tokens=torch.zeros(3, 5)), r"tokens as a tensor \[3, 4\]; got \[3, 5\]"),
        (Selection(THREE, tokens=torch.full((3, 4), torch.nan)), "tokens that are NaN"),
        (Selection(THREE, merged=torch.ones(2, dtype=torch.bool)), r"merged as a tensor \[3\]; got \[2\]"),
        (Selection(THREE, density=torch.zeros(3)), r"density as a tensor \[12\]; got \[3\]"),
        (Selection(THREE, temporal_density=torch.zeros(3)), r"temporal_density as a tensor \[2\]; got \[3\]"),
    ],
)
def test_a_selection_that_cannot_be_kept_is_refused_by_the_methods_name(returned: Any, why: str) -> None:
    with pytest.raises(RuntimeError, match=f"method 'wrong' must (not )?return {why}"):
        gstep.prune(video(2, 6, 4), 0.25, Wrong(returned=returned))


def test_only_an_inexact_method_may_keep_another_number() -> None:
    two = Selection(torch.tensor([7, 1], dtype=torch.int32))
    pruned = gstep.prune(video(2, 6, 4), 0.25, WrongInNumber(returned=two))
    assert (pruned.index.tolist(), pruned.index.dtype) == ([1, 7], torch.int64)
    with pytest.raises(RuntimeError, match=r"index as a tensor \[3\]; got \[2\]"):
        gstep.prune(video(2, 6, 4), 0.25, Wrong(returned=two))
    with pytest.raises(RuntimeError, match=r"index as a tensor \[1\]; got \[0\]"):
        gstep.prune(video(2, 6, 4), 0.25, WrongInNumber(returned=Selection(THREE[:0])))


def test_merged_tokens_follow_their_index() -> None:
    tokens, index = video(2, 6, 4), torch.tensor([7, 1, 4])
    rows = tokens.flatten(0, 1)[index] * torch.tensor([[2.0], [1.0], [1.0]])
    merged = torch.tensor([True, False, False])
    pruned = gstep.prune(tokens, 0.25, Wrong(returned=Selection(index, tokens=rows, merged=merged)))
    assert pruned.index.tolist() == [1, 4, 7] and torch.equal(pruned.tokens, rows[[1, 2, 0]])
    assert pruned.merged is not None and pruned.merged.tolist() == [False, False, True]


def test_objects_of_what_is_no_method_are_refused() -> None:
    class Plain(Last):
        pass

    with pytest.raises(ValueError, match="is not a dataclass"):
        gstep.prune(video(2, 3, 4), method=Plain())
    for nonsense in (3, None, object(), dataclasses.field):
        with pytest.raises(ValueError, match="unknown method"):
            gstep.prune(video(2, 3, 4), method=nonsense)  # type: ignore[arg-type]
