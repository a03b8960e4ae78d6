"""Late pruning goes by what a method declares: any method with the same declarations is treated the same."""

import pickle
import sys
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from gstep.backbones import ModelSource, family_of
from gstep.evidence import LAST_LAYER, SINGLE_PATCHES
from gstep.language import Visual
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.cdpruner import CDPruner
from gstep.pruners.fastv import FastV
from pipeline.errors import UsageError
from pipeline.generate.answerer import Answerer
from pipeline.generate.config import GenerateConfig
from pipeline.generate.late_pruning import LatePruning
from pipeline.generate.prompts import TextEmbeddings
from pipeline.generate.request import choose_token_order
from tests.builders.answers import request_about, sent, setup_of, tiny_cache, tiny_cache_with_embeddings

T, N, D = 5, 20, 16
ATTENTION = (("token_attention", "token_attention"),)


def whole_video() -> Visual:
    rng = torch.Generator().manual_seed(0)
    evidence = {"token_attention": torch.rand(T * N, generator=rng), "image_embedding": torch.randn(T * N, 7)}
    tokens, levels = torch.randn(T * N, D, generator=rng).bfloat16(), (torch.randn(T * N, D, generator=rng),)
    return Visual(tokens, torch.arange(T * N), T, N, deepstack=levels, evidence=evidence)


def chosen_by(late: LatePruning, visual: Visual, words: torch.Tensor | None = None) -> Visual:
    return late.reduce_video(visual, late.select(visual, "cpu", words))


@pytest.mark.parametrize(
    ("mode", "ratio"), [("global", 0.25), ("global", 0.9), ("per_frame", 0.9), ("per_frame", 0.01)]
)
def test_the_size_of_a_prompt_is_foreseen(mode, ratio):
    """CDPruner keeps no more than D of what it chooses among, and per frame at least one of each."""
    visual = Visual(torch.randn(T * N, D), torch.arange(T * N), T, N)
    late = LatePruning(CDPruner(mode=mode), ratio)
    assert len(chosen_by(late, visual, torch.randn(1, D)).index) == late.max_tokens(T, N, D)
    assert LatePruning(FastV(), ratio).max_tokens(T, N, D) == T * N


class Noting(CDPruner):
    """Notes the devices of what it looks at."""

    def prune(self, visual, ratio, seed):
        devices = [visual.tokens.device.type, *(value.device.type for value in visual.evidence.values())]
        return SimpleNamespace(index=torch.tensor([1, 3]), devices=devices)


def test_a_question_is_pruned_for_on_the_device_of_the_model():
    visual = Visual(torch.randn(6, 4), torch.arange(6), 2, 3, deepstack=(torch.randn(6, 4),))
    late = LatePruning(Noting(), 0.5)
    pruned = late.select(visual, "meta", torch.empty(1, 4, device="meta"))
    chosen = late.reduce_video(visual, pruned)
    assert pruned.devices == ["meta"] * 3
    assert torch.equal(chosen.tokens, visual.tokens[[1, 3]]) and chosen.index.tolist() == [1, 3]


@dataclass(frozen=True, kw_only=True)
class Attended(Pruner):
    """Looks at what the cache holds and, as it says, at the question."""

    name: ClassVar[str] = "attended"
    nested: ClassVar[bool] = False
    cacheable: ClassVar[bool] = False
    sources: ClassVar[MappingProxyType] = MappingProxyType({"token_attention": LAST_LAYER})
    needs: ClassVar[frozenset[str]] = frozenset(sources)

    def select(self, visual, budget, ratio, seed):
        return Selection(visual.evidence["token_attention"].flatten().argsort(descending=True, stable=True)[:budget])


@dataclass(frozen=True, kw_only=True)
class Matching(Attended):
    """Compares the question with the patches, as CDPruner does."""

    name: ClassVar[str] = "matching"
    sources: ClassVar[MappingProxyType] = MappingProxyType({"image_embedding": SINGLE_PATCHES})
    needs: ClassVar[frozenset[str]] = frozenset({"image_embedding", "text_embedding"})

    def select(self, visual, budget, ratio, seed):
        match = visual.evidence["image_embedding"] @ visual.evidence["text_embedding"].mean(dim=0)
        return Selection(match.flatten().argsort(descending=True, stable=True)[:budget])


@dataclass(frozen=True, kw_only=True)
class Deep(Attended):
    """Prunes inside the model."""

    sources: ClassVar[MappingProxyType] = MappingProxyType({})
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})

    layer: int = 1  # a field declares it as well as a property


@dataclass(frozen=True, kw_only=True)
class Drawn(Deep):
    """Draws inside the model, with a list among its parameters."""

    seeded: ClassVar[bool] = True

    weights: list[float] = field(default_factory=lambda: [1.0, 2.0])

    def select(self, visual, budget, ratio, seed):
        return Selection(torch.randperm(visual.tokens.shape[1], generator=torch.Generator().manual_seed(seed))[:budget])


@dataclass(frozen=True, kw_only=True)
class Unsourced(Attended):
    sources: ClassVar[MappingProxyType] = MappingProxyType({})


def path(kind: type[Pruner]) -> str:
    return f"{__name__}:{kind.__name__}"


def test_no_embedding_is_made_for_a_method_that_needs_none():
    late = LatePruning(Attended(), 0.1, evidence=ATTENTION)
    assert TextEmbeddings(None, "cpu", [late]).embedding(late, "What?") is None  # nobody is asked


def test_a_method_may_match_cached_patches_or_the_tokens_themselves():
    visual, words = whole_video(), torch.randn(2, D)
    for evidence, patches in (
        ((), visual.tokens.float()),
        ((("image_embedding", "image_embedding"),), visual.evidence["image_embedding"]),
    ):
        asked = words[:, : patches.shape[1]]
        chosen = chosen_by(LatePruning(Matching(), 0.1, evidence=evidence), visual, asked)
        match = patches @ asked.mean(dim=0)
        assert set(chosen.index.tolist()) == set(match.argsort(descending=True)[:10].tolist())


@pytest.fixture
def request_for(tmp_path):
    """A request about the video "a" of the cache in ``tmp_path / "c"``, checked."""

    def make(method, *params, **options):
        rows = [{"question_id": 1, "video_id": "a", "prompt": "What?"}]
        asked = {"pruner": method, "pruner_param": [*params], "retention_ratio": 0.1}
        return request_about(tmp_path / "c", rows, **asked, **options)

    return make


def test_what_a_method_needs_is_found_by_what_it_declares(request_for, tmp_path):
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    job = request_for(path(Deep))
    assert job.setup.prunings[""].inside == (Deep(), 0.1) and job.setup.prunings[""].evidence == ()
    assert job.identity["pruner"]["method"] == path(Deep) and job.identity["pruner"]["params"] == {"layer": 1}
    assert job.identity["pruner"]["declares"] == {"nested": False, "merges": False, "exact": True, "reorders": False}
    for kind, params, options, why in (
        (Deep, ["layer=2"], {}, r"attended with layer=2 prunes before layer 2; this model has 2 layers"),
        (Deep, ["layer=deep"], {}, r"layer must be an integer; got 'deep'"),
        (Attended, [], {}, r"Attended needs token_attention on llava.*--evidence .*Attended$"),
        (Unsourced, [], {}, r"Unsourced needs token_attention .*does not say where in an encoder"),
        (Matching, [], {}, r"Matching needs image_embedding .*--evidence .*Matching --siglip MODEL"),
        (Deep, [], {"siglip": "tiny"}, r"--siglip: no method that is asked takes anything from a SigLIP checkpoint"),
    ):
        with pytest.raises(UsageError, match=why):
            request_for(path(kind), *params, **options)


def test_tokens_in_an_order_of_their_own_are_read_by_position_where_a_method_prunes_them_now():
    declares = {"nested": False, "merges": False, "exact": True, "reorders": True}
    cached = {"pruner": {"method": "mine:Mine", "params": {}, "declares": declares}, "retention_ratio": 1.0}
    config, late = GenerateConfig(questions="q.jsonl"), LatePruning(Attended(), 0.1)
    assert choose_token_order(config, cached, {"": None}) == "selection"
    assert choose_token_order(config, cached, {"": late}) == "index"
    assert choose_token_order(config, cached, {"none@1": None, "attended@0.1": late}) == "index"
    with pytest.raises(UsageError, match="--order own"):
        choose_token_order(replace(config, order="own"), cached, {"": late})


def test_a_seed_that_a_method_inside_the_model_would_not_draw_by_is_refused(request_for, tmp_path):
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    assert request_for(path(Drawn)).identity["pruner"]["seed"] == 0
    with pytest.raises(UsageError, match=r"Drawn prunes inside the language model, where it draws with seed 0"):
        request_for(path(Drawn), pruner_seed=1)


def test_a_parameter_may_be_a_list(tmp_path):
    """A tuple is no JSON, and a list has no hash."""
    store = tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    asked = [{"question_id": 1, "video_id": "a", "prompt": "What?", "max_new_tokens": 2}]
    job = request_about(tmp_path / "c", asked, pruner=path(Drawn), retention_ratio=0.1)
    (row,) = Answerer(setup_of(store, prunings=job.setup.prunings)).answer(sent(job.questions))
    assert (row["status"], row["n_kept"]) == ("ok", 19)


def test_a_text_tower_goes_with_any_method_that_matches_patches(request_for, tmp_path):
    head = family_of(ModelSource.resolve("tiny")).text_tower("tiny").head.identity
    tiny_cache_with_embeddings(tmp_path / "c", head=head)
    late = request_for(path(Matching), siglip="tiny").setup.prunings[""]
    assert late.evidence == (("image_embedding", "image_embedding"),) and late.text_tower.head.identity == head
    with pytest.raises(UsageError, match="name it with --siglip"):
        request_for(path(Matching))


def test_on_qwen_the_language_model_embeds_the_question(request_for, tmp_path):
    source = ModelSource.resolve("tiny-qwen2-5-vl")
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none", source=source, newline=None)
    late = request_for(path(Matching)).setup.prunings[""]
    assert (late.evidence, late.text_tower) == ((), None)
    model = SimpleNamespace(embedding="embedded: {}".format)
    assert TextEmbeddings(model, "cpu", [late]).embedding(late, "What?") == "embedded: What?"


def test_a_worker_without_the_methods_module_says_so(monkeypatch):
    late = LatePruning(Attended(), 0.1, evidence=ATTENTION)
    data = pickle.dumps(late)
    assert pickle.loads(data) == late  # noqa: S301 - our own
    monkeypatch.setitem(sys.modules, __name__, None)
    with pytest.raises(ValueError, match=rf"method '{path(Attended)}' cannot be imported.*importable on every machine"):
        pickle.loads(data)  # noqa: S301
