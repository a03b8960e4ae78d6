"""The names of sources: what methods ask for, some family gives."""

import pytest

from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES
from gstep.evidence import SOURCES


@pytest.mark.parametrize("method", [method for method in PRUNERS if PRUNERS[method].cacheable])
def test_every_method_that_can_be_cached_says_where_its_evidence_is_and_some_family_has_it(method):
    variants = [{"variant": v} for v in ("llava", "qwen")] if "variant" in make_pruner(method).params() else [{}]
    for params in variants:
        pruner = make_pruner(method, **params)
        assert pruner.needs == pruner.sources.keys() and set(pruner.sources.values()) <= SOURCES.keys()
        able = [family for family in BACKBONES.values() if family.gives >= set(pruner.sources.items())]
        assert [family for family in able if params.get("variant", family.variant) == family.variant]
