"""The tables of methods and of sources of evidence, and what errors promise to their callers."""

import pickle
import subprocess
import sys

import pytest

import gstep
from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES
from gstep.errors import MissingEvidence, ModelError, UnsupportedVideo
from gstep.evidence import SOURCES
from gstep.lazy import load_object
from gstep.methods import METHODS, OF_A_QUESTION, OF_A_VIDEO


def test_every_line_names_a_class_by_its_own_name():
    assert not OF_A_VIDEO.keys() & OF_A_QUESTION.keys()
    for name, target in METHODS.items():
        assert load_object(target).name == name


def test_listing_the_methods_loads_no_torch():
    code = "import sys, gstep.methods; print(len(gstep.methods.METHODS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(METHODS)), "False"]


@pytest.mark.parametrize("method", [method for method in PRUNERS if PRUNERS[method].cacheable])
def test_every_method_that_can_be_cached_says_where_its_evidence_is_and_some_family_has_it(method):
    variants = [{"variant": v} for v in ("llava", "qwen")] if "variant" in make_pruner(method).params() else [{}]
    for params in variants:
        pruner = make_pruner(method, **params)
        assert pruner.needs == pruner.sources.keys() and set(pruner.sources.values()) <= SOURCES.keys()
        able = [family for family in BACKBONES.values() if family.gives >= set(pruner.sources.items())]
        assert [family for family in able if params.get("variant", family.variant) == family.variant]


@pytest.mark.parametrize("kind", [ModelError, MissingEvidence, UnsupportedVideo])
def test_an_error_is_a_value_error_and_keeps_its_message_between_processes(kind):
    again = pickle.loads(pickle.dumps(kind("name the remedy")))  # noqa: S301 - our own bytes
    assert type(again) is kind and isinstance(again, ValueError) and str(again) == "name the remedy"
    assert gstep.MissingEvidence is MissingEvidence
