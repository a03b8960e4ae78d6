"""The tables of methods, of sources of evidence and of families, and what errors promise to their callers."""

import pickle

import pytest

import gstep
from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES, ModelSource, family_of
from gstep.backbones.base import ModelFamily
from gstep.checkpoints import tiny
from gstep.errors import MissingEvidence, ModelError, UnsupportedVideo
from gstep.evidence import SOURCES
from gstep.families import FAMILIES, GENERIC
from gstep.language import BUILDERS, PromptBuilder, prompt_builder
from gstep.lazy import load_object
from gstep.methods import METHODS, QUESTION_METHODS, VIDEO_METHODS


def test_every_line_names_a_class_by_its_own_name():
    assert not VIDEO_METHODS.keys() & QUESTION_METHODS.keys()
    for name, target in METHODS.items():
        assert load_object(target).name == name


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


def test_both_halves_know_the_same_families():
    assert [*BACKBONES, GENERIC] == list(FAMILIES)
    assert [name for name in BACKBONES if name not in BUILDERS] == ["qwen4_exp"]  # which is encoded and not asked
    for name in BUILDERS:
        assert issubclass(BACKBONES[name], ModelFamily) and issubclass(BUILDERS[name], PromptBuilder)
        assert BACKBONES[name].model_type == name


def test_every_family_has_a_tiny_model():
    sources = [ModelSource.resolve(name) for name in tiny.TINY]
    assert {source.model_type for source in sources} == set(BUILDERS)
    for source in sources:
        family = family_of(source)
        assert isinstance(family, BACKBONES[source.model_type]) and family.source is source
        assert isinstance(prompt_builder(source), BUILDERS[source.model_type])
