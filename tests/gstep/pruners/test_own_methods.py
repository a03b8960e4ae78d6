"""Methods from outside the package, by object or import path; parameters against the types of a method's fields."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners import find_method, get_method_name, read_pruner
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


class Plain(Last):
    pass


NOWHERE = ("no_such_module:Mine", "tests:", ":Mine", "os:path.join", "a:b:c")


@pytest.mark.parametrize(
    ("method", "params", "why"),
    [
        *((path, {}, f"method '{re.escape(path)}' ") for path in NOWHERE),
        *((nonsense, {}, "unknown method") for nonsense in (3, None, object(), dataclasses.field)),
        (Plain(), {}, "is not a dataclass"),
        (Last, {}, r"Last is a class: pass an object, Last\(\.\.\.\), or its path"),
        (GSTEP(), {"alpha": 0.5}, "alpha: an object of gstep has its parameters: pass them to its class"),
    ],
)
def test_paths_and_objects_of_what_is_no_method_are_refused(method: Any, params: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        gstep.prune(video(2, 3, 4), method=method, **params)


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


WRONG: dict[Any, list[Any]] = {
    int: ["abc", 1.5, "1", True, [1], {}, b"1"],
    float: ["abc", "0.5", True, [0.5], float("nan"), 1j],
    str: [1, 0.5, True, ["gaussian"], b"raw"],
}


@pytest.mark.parametrize("method", gstep.PRUNERS)
def test_a_value_of_a_wrong_type_is_refused_for_every_parameter(method: str) -> None:
    kind = gstep.PRUNERS[method]
    for name, hint in ((item.name, get_type_hints(kind)[item.name]) for item in fields(kind)):
        accepted = get_args(hint) or (hint,)
        (own,) = set(accepted) - {type(None)}
        for value in [*WRONG[own], *([] if type(None) in accepted else [None]), object()]:
            with pytest.raises(ValueError, match=rf"'{method}': {name} must be .*; got "):
                gstep.prune(video(2, 3, 4), method=method, **{name: value})
        if own is not str:
            for text in ("abc", "", "1,5", "nan", "true"):
                with pytest.raises(ValueError, match=rf"'{method}': {name} must be .*; got '{text}'"):
                    read_pruner(method, {name: text})


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400)], ids=["integer", "negative", "fraction"])
def test_a_number_beyond_all_floats_is_refused(value: Any) -> None:
    for method, name in (("gstep", "alpha"), ("fps", "sigma"), ("novelty", "floor"), ("fastvid", "tau")):
        with pytest.raises(ValueError, match=rf"'{method}': {name} must be a number.*; got "):
            gstep.make_pruner(method, **{name: value})
        with pytest.raises(ValueError, match=rf"{name} must be a number .*; got "):
            gstep.PRUNERS[method](**{name: value})


@dataclass(frozen=True, kw_only=True)
class Typed(Pruner):
    """A method that checks nothing by itself."""

    name: ClassVar[str] = "typed"
    nested: ClassVar[bool] = True

    count: int = 1
    share: float = 0.5
    on: bool = False
    word: str = "a"
    side: Literal["left", "right"] = "left"
    level: Literal[1, 2, "all"] = 1
    maybe: float | None = None
    either: int | str = 0
    number: int | float = 0
    shape: tuple[int, ...] = ()

    def select(self, visual: gstep.VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        return Selection(torch.arange(budget))


TYPED = f"{__name__}:Typed"


TEXTS = {
    "count": {"3": 3, "-3": -3},
    "share": {"3": 3.0, "1e-3": 0.001},
    "on": {"true": True, "False": False},
    "word": {"3": "3", "007": "007", "none": "none", "": ""},
    "side": {"right": "right"},
    "level": {"2": 2, "all": "all"},
    "maybe": {"none": None, "2": 2.0},
    "either": {"2": 2, "2.5": "2.5"},
    "number": {"2": 2, "2.5": 2.5},
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_read_by_the_type_of_the_field(name: str) -> None:
    for text, value in TEXTS[name].items():
        read = getattr(read_pruner(TYPED, {name: text}), name)
        assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("count", "3.0", "an integer"),
        ("share", "inf", "a number"),
        ("on", "1", "true or false"),
        ("side", "up", "one of left, right"),
        ("maybe", "abc", "a number or none"),
        ("shape", "1", "of type tuple.* and cannot be given as text"),
    ],
)
def test_text_of_another_type_says_what_is_accepted(name: str, text: str, accepted: str) -> None:
    with pytest.raises(ValueError, match=rf"Typed': {name} must be {accepted}; got '{text}'"):
        read_pruner(TYPED, {name: text})


def test_values_are_checked_for_names_and_for_objects() -> None:
    wrong = [("count", "1"), ("count", True), ("share", "1"), ("on", 1), ("on", "true"), ("word", 1), ("word", None)]
    wrong += [("side", "up"), ("level", 3), ("level", True), ("level", "1"), ("maybe", "none"), ("either", 1.5)]
    for name, value in wrong:
        for method, params in ((TYPED, {name: value}), (Typed(**{name: value}), {})):
            with pytest.raises(ValueError, match=rf"Typed': {name} must be .*; got "):
                gstep.prune(video(2, 3, 4), method=method, **params)


def test_values_become_those_of_the_fields_types() -> None:
    made = gstep.make_pruner(TYPED, count=np.int64(3), share=1, maybe=np.float32(2), either="x", shape=(1, 2))
    assert made == Typed(count=3, share=1.0, maybe=2.0, either="x", shape=(1, 2))
    types = [int, float, bool, str, str, int, float, str, int, tuple]
    assert [type(value) for value in made.params().values()] == types


@dataclass(frozen=True, kw_only=True)
class Careless(Typed):
    needed: int

    def __post_init__(self) -> None:
        _ = 1 / self.needed


def test_a_check_that_the_author_forgot_a_case_of_is_a_refusal() -> None:
    with pytest.raises(ValueError, match="Careless' needs a value of needed"):
        gstep.make_pruner(f"{__name__}:Careless")
    with pytest.raises(ValueError, match=r"Careless' cannot be made with .*ZeroDivisionError"):
        gstep.make_pruner(f"{__name__}:Careless", needed=0)
