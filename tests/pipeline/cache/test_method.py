"""What a cache says of its method, and that whoever reads it imports nothing for it."""

import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from gstep import PRUNERS, make_pruner
from gstep.pruners.base import Pruner, Selection
from pipeline.cache.method import Declared, declared_method, describe_method


@dataclass(frozen=True, kw_only=True)
class Own(Pruner):
    name: ClassVar[str] = "own"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    reorders: ClassVar[bool] = True

    weights: Any = field(default=1.5)

    def select(self, visual, budget, ratio, seed):
        return Selection(torch.arange(budget))


def test_methods_of_the_table_are_their_names_and_parameters():
    for name in PRUNERS:
        pruner = make_pruner(name)
        assert describe_method(pruner) == {"method": name, "params": pruner.params()}
        assert declared_method({"pruner": {"method": name, "params": {}}}) == Declared.by(PRUNERS[name])


def test_one_from_outside_brings_what_it_declares(monkeypatch):
    described = describe_method(Own())
    assert described == {
        "method": f"{__name__}:Own",
        "params": {"weights": 1.5},
        "declares": {"nested": False, "merges": True, "exact": True, "reorders": True},
    }
    monkeypatch.setitem(sys.modules, __name__, None)  # an import would fail
    assert declared_method({"pruner": described}) == Declared(nested=False, merges=True, exact=True, reorders=True)


@pytest.mark.parametrize("pruner", [{"method": "os:path"}, {}, {"method": "m:C", "declares": {"nested": True}}])
def test_what_is_not_said_is_unknown(pruner):
    assert declared_method({"pruner": pruner}) is None
    assert declared_method({}) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1, 2), {1: 2}, object(), torch.ones(1)])
def test_a_parameter_that_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match=r"Own': parameters are recorded as JSON, which cannot hold"):
        describe_method(Own(weights=value))
