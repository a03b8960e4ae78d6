"""The one table of model families: a line there is enough for both halves of the package to know a family."""

import pytest

from gstep.backbones import BACKBONES, ModelSource, family_of
from gstep.backbones.base import ModelFamily
from gstep.checkpoints import tiny
from gstep.families import FAMILIES
from gstep.language import BUILDERS, PromptBuilder, prompt_builder


def test_both_halves_know_the_same_families():
    assert list(BACKBONES) == list(FAMILIES)
    assert [name for name in FAMILIES if name not in BUILDERS] == ["qwen4_exp"]  # which is encoded and not asked


@pytest.mark.parametrize("model_type", BUILDERS)
def test_a_family_has_both_classes_and_goes_by_one_name(model_type):
    assert issubclass(BACKBONES[model_type], ModelFamily) and issubclass(BUILDERS[model_type], PromptBuilder)
    assert BACKBONES[model_type].model_type == model_type


def test_every_family_has_a_tiny_model():
    sources = [ModelSource.resolve(name) for name in tiny.TINY]
    assert {source.model_type for source in sources} == set(BUILDERS)
    for source in sources:
        family = family_of(source)
        assert isinstance(family, BACKBONES[source.model_type]) and family.source is source
        assert isinstance(prompt_builder(source), BUILDERS[source.model_type])
