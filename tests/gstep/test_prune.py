"""gstep.prune and its result, the tables of methods and families, errors, and the examples of ``gstep/examples``."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES
from gstep.backbones.base import ModelFamily
from gstep.errors import MissingEvidence, ModelError, UnsupportedVideo
from gstep.evidence import SOURCES
from gstep.families import FAMILIES, GENERIC
from gstep.language import BUILDERS, PromptBuilder
from gstep.lazy import LazyTable, load_object, pause_garbage_collector, repeat_line
from tests.examples import run_example
from tests.gstep.synthetic import FLOATS, prune, video
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        *(
            (name, {}, "unknown method .*none, random, uniform, topk, fps, gstep")
            for name in ("gsteb", None, ["gstep"])
        ),
        ("gstep", {"alhpa": 0.5}, "unknown parameter alhpa .*'gstep'.*alpha, beta"),
        ("random", {"alpha": 0.5}, "unknown parameter alpha of method 'random'; it accepts: none"),
        ("gstep", {"name": "mine"}, "unknown parameter name"),
    ],
)
def test_unknown_names_say_what_is_known(method: Any, params: dict[str, Any], words: str) -> None:
    for refuse in (gstep.make_pruner, lambda method, **params: gstep.prune(video(2, 3, 4), method=method, **params)):
        with pytest.raises(ValueError, match=words):
            refuse(method, **params)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gstep.nonsense  # type: ignore[attr-defined]


def test_non_finite_tokens_and_bad_seeds_are_refused() -> None:
    for dtype, value in product(FLOATS, (float("nan"), float("inf"), -float("inf"))):
        tokens = video(4, 5, 6).to(dtype)
        tokens[2, 3, 1] = tokens[2, 3, 4] = tokens[3, 0, 0] = value
        with pytest.raises(ValueError, match=r"3 non-finite .* frame 2, token 3"):
            gstep.prune(tokens)
    for seed in (-1, 0.5, "0", None, True):
        with pytest.raises(ValueError, match="seed"):
            gstep.prune(video(2, 3, 4), method="random", seed=seed)  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")
BAD_PARAMS = {  # values of other types are those of pruners/test_own_methods.py
    (NAN, INF, -1): "novelty.floor",
    (NAN, INF, -1, 0): "gstep.beta fps.beta novelty.beta gstep.eps topk.eps fps.eps flashvid.expansion",
    (NAN, INF, -1, 0, 3334): "gstep.sigma topk.sigma fps.sigma",
    (NAN, INF, -1, 0, 1.5): "fastvid.c fastvid.p",
    (NAN, INF, -1, 1): "visionzip.dominant_share",
    (NAN, INF, -1, 1.01): "gstep.alpha fastvid.d fastvid.beta",
    (NAN, 1.01): "fastvid.tau fastvid.ignore holitom.D holitom.beta holitom.tau flashvid.alpha",
    (1.01,): "flashvid.temporal_threshold flashvid.segment_threshold",
    (-1, 0): "visionzip.neighbours fastv.K holitom.K holitom.max_window vcast.tau flashvid.min_segment_num",
    (-1, 10_001): "gstep.radius",
    ("other", ""): "gstep.smoothing gstep.boundary gstep.fusion fps.start cdpruner.mode",
    ("llama",): "fastvid.variant visionzip.variant",
}


def test_bad_parameters() -> None:
    for values, names in BAD_PARAMS.items():
        for value, (method, _, name) in product(values, (name.partition(".") for name in names.split())):
            with pytest.raises(ValueError, match=rf"{name} must be .*; got "):
                gstep.prune(video(2, 3, 4), method=method, **{name: value})


def test_numpy_numbers_are_numbers() -> None:
    tokens = video(5, 13, 8)
    ours = gstep.prune(tokens, np.float32(0.25), alpha=np.float64(0.5), radius=np.int64(3), seed=np.int32(0))  # type: ignore[arg-type]
    assert ours.index.tolist() == gstep.prune(tokens).index.tolist()
    assert gstep.prune(tokens, budget=np.int64(3)).index.shape == (3,)  # type: ignore[arg-type]


def test_budget_of_a_percentage_is_exact() -> None:
    for percent, n_total in product(range(1, 101), (1, 29, 196, 6272, 99_999)):
        assert gstep.budget_for(percent / 100, n_total) == max(1, percent * n_total // 100)


def test_results_are_equal_where_all_their_tensors_are() -> None:
    tokens = video(3, 8, 8)
    pruned = prune(tokens)
    assert pruned == prune(tokens) and pruned.at(0.25) == pruned
    assert pruned != prune(tokens, 0.5) and pruned != prune(tokens, method="visionzip") and pruned != 1
    others: dict[str, Any] = {"n_total": 25, "retention_ratio": 0.26, "merged": pruned.index > 3, "order": pruned.rank}
    for item in fields(pruned):
        value = getattr(pruned, item.name)
        other = value + 1 if isinstance(value, torch.Tensor) else others[item.name]
        assert pruned != replace(pruned, **{item.name: other}), item.name
        if isinstance(value, torch.Tensor):
            for unlike in (None, value.to(torch.float64 if value.is_floating_point() else torch.int32), value[:-1]):
                assert pruned != replace(pruned, **{item.name: unlike}), item.name


def test_visual_tokens_are_compared_with_their_evidence_and_deepstack_and_have_no_hash() -> None:
    tokens = video(3, 8, 8)
    visual = gstep.VisualTokens(tokens, {"noise": tokens[0, 0]}, (tokens, tokens))
    assert visual == gstep.VisualTokens(tokens.clone(), {"noise": tokens[0, 0].clone()}, (tokens.clone(), tokens))
    others: list[dict[str, Any]] = [{"grid": (2, 4)}, {"times": (0.0, 1.0, 2.0)}, {"tokens": -tokens}, {"evidence": {}}]
    others += [{"evidence": {"noise": tokens[0, 1]}}, {"deepstack": (tokens,)}, {"deepstack": (tokens, -tokens)}]
    assert all(visual != replace(visual, **other) for other in others) and visual != prune(tokens)
    for value in (visual, prune(tokens)):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)


def test_a_grid_and_times_are_what_is_known_or_the_nearest_guess() -> None:
    for size, grid in ((196, (14, 14)), (12, (3, 4)), (13, (1, 13)), (1, (1, 1))):
        assert gstep.VisualTokens(video(2, size, 4)).known_grid == grid
    visual = gstep.VisualTokens(video(3, 8, 4))
    assert visual.known_times == (0.0, 1.0, 2.0)
    placed = visual.with_positions([4, 2], [0, 0.5, 1.0])
    assert (placed.grid, placed.known_grid, placed.known_times) == ((4, 2), (4, 2), (0.0, 0.5, 1.0))
    # Patches of two frames begin with the first of them; the last patch may have a single one.
    for timestamps in ([0.5, 1, 2, 3, 4, 5], [0.5, 1, 2, 3, 4]):
        assert visual.with_positions(None, timestamps).times == (0.5, 2.0, 4.0)
    for unfit in ([], [0.5], [0.0] * 4):
        assert visual.with_positions(None, unfit).times is None


def test_grids_and_times_that_do_not_fit_are_refused() -> None:
    tokens = video(3, 8, 4)
    assert gstep.prune(tokens, grid=(2, 4), times=[0, 2.5, 3]).n_kept == 6
    for grid in ((3, 3), (8,), 8, (2.0, 4.0), (-2, -4), "24"):
        with pytest.raises(ValueError, match=r"grid must be \(rows, columns\) of the 8 tokens"):
            gstep.prune(tokens, grid=grid)  # type: ignore[arg-type]
    for times in ((0.0, 1.0), (0.0, 1.0, float("nan")), "abc", (0, 1, None), (False, True, True)):
        with pytest.raises(ValueError, match="times must be the seconds of the 3 frames"):
            gstep.prune(tokens, times=times)  # type: ignore[arg-type]


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


TABLE = LazyTable("colour", {"red": "gstep.errors:ModelError", "blue": "no.such.module:Blue"})


def test_names_are_listed_without_an_import_and_an_unknown_one_lists_the_known(monkeypatch):
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    table = LazyTable("name", {"a": "json.tool:main"})
    assert "json.tool" not in sys.modules
    assert callable(table["a"]) and "json.tool" in sys.modules
    assert TABLE["red"] is load_object("gstep.errors:ModelError")
    assert list(TABLE) == ["red", "blue"] and len(TABLE) == 2
    assert "blue" in TABLE and "green" not in TABLE
    with pytest.raises(ModuleNotFoundError):
        TABLE["blue"]
    with pytest.raises(KeyError, match="unknown colour 'green'; known: red, blue"):
        TABLE["green"]
    with pytest.raises(KeyError, match=r"unknown colour 'redd' \(did you mean red\?\); known: red, blue"):
        TABLE["redd"]


def test_a_line_is_said_until_the_work_ends():
    lines: list[str] = []
    with repeat_line(lines.append, "still loading", 0.001):
        wait_until(lambda: len(lines) > 2, "three lines")
    with repeat_line(lines.append, "never", 3600.0):
        pass
    assert set(lines) == {"still loading"} and all(thread.name != "repeat_line" for thread in threading.enumerate())


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_imported_is_not_looked_through_for_garbage(monkeypatch, enabled):
    gc.unfreeze()  # what a command that another test ran in this process has imported
    (gc.enable if enabled else gc.disable)()
    try:
        with pause_garbage_collector():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled and gc.get_freeze_count() == 0  # nothing was imported
        with pytest.raises(ZeroDivisionError), pause_garbage_collector():
            monkeypatch.setitem(sys.modules, "just_imported", sys)
            1 // 0  # noqa: B018
        assert gc.isenabled() is enabled and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_methods_are_compared(capsys):
    run_example("gstep/examples/compare_methods.py")
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("gstep    keeps 784 of 3136:  784 of gstep's") and len(others) == 6
    assert all(" keeps 784 of 3136: " in line for line in others)


def test_a_live_model_answers_from_pruned_tokens(capsys):
    run_example("gstep/examples/live_model.py")
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "all tokens: B, after a prompt of 595 tokens"
    assert [line.partition(":")[0] for line in others] == ["25% by gstep", "5% by gstep", "5% by random"]
    assert not any(line.endswith(" 0.0") for line in others)
