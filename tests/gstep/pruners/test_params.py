"""Parameters against the types of a method's fields, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners import read_pruner
from gstep.pruners.base import Pruner, Selection
from tests.gstep.synthetic import video

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
