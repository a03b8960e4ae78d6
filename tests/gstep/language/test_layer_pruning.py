"""FastV inside the language model: what it drops is as good as masked from layer K on, and the cache is shorter."""

import dataclasses
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, DynamicCache

from gstep.backbones import ModelSource, choose_runtime
from gstep.checkpoints import tiny
from gstep.errors import WrongSelection
from gstep.language import Decoding, load_language_model, prompt_builder
from gstep.language.batch import Batch, encoder_outputs
from gstep.language.layer_pruning import CACHE, check_prune_layer
from gstep.language.types import read_placeholder
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.fastv import FastV
from gstep.pruners.random import Random
from gstep.types import budget_for
from tests.gstep.llms import FAMILIES, RECURRENT, continue_prompt, encode, ids_of, kept_index, llm
from tests.gstep.reading import changed_json

LAYERS = 5
K = 3
# Of one axis and with newlines; of three, by eager attention.
NAMES = ("tiny", "tiny-qwen2-5-vl")
RATIO = 0.25
GREEDY = Decoding(max_new_tokens=8)


@pytest.fixture(scope="module")
def deep(name, tmp_path_factory):
    """The tiny model with more layers: the first two of its own, the others copies of them."""
    folder = Path(shutil.copytree(tiny.build(name), tmp_path_factory.mktemp("deep") / name))
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    state = {k: v.clone() for k, v in whole.state_dict().items()}
    with changed_json(folder / "config.json") as config:
        text = config.get("text_config", config)
        own, text["num_hidden_layers"] = text["num_hidden_layers"], LAYERS
        text.pop("layer_types", None)
    for layer in range(own, LAYERS):
        for key in [k for k in state if f"language_model.layers.{layer % own}." in k]:
            copy = key.replace(f"layers.{layer % own}.", f"layers.{layer}.")
            # Turned, so that no layer does what another one does.
            state[copy] = state[key].flip(0).contiguous() if state[key].ndim == 2 else state[key].clone()
    save_file(state, folder / "model.safetensors")
    return ModelSource.resolve(folder)


@pytest.fixture(scope="module")
def loaded(name, deep):
    """The model, one family by eager attention."""
    return load_language_model(deep, choose_runtime("cpu", "float32", "eager" if name == "tiny-qwen2-5-vl" else "sdpa"))


@pytest.fixture(scope="module")
def prompts(name, deep):
    video, other = encode(name), encode(name, "carphone_pristine.mp4", n_frames=2, grid=(4, 10))
    build = prompt_builder(deep, "original").build
    return [
        build("What is happening in this video?", [video.visual]),
        build("Why?", [other.keep(kept_index(other, 0.5))]),
        build("Which is longer?", [other.visual, video.visual]),
    ]


def forward(loaded, prompt, **more):
    batch = Batch.of([prompt])
    with torch.no_grad():
        return loaded.model(
            input_ids=batch.input_ids,
            attention_mask=batch.mask,
            position_ids=batch.position_ids(),
            mm_encoder_outputs=encoder_outputs(prompt.visuals, loaded.model),
            use_cache=True,
            **{CACHE: DynamicCache(config=loaded.model.config.get_text_config())},
            **more,
        )


def pruned_forward(loaded, prompt, ratio=RATIO):
    inside = loaded._prune_inside([prompt], FastV(K=K), ratio)
    with inside.apply_hooks(loaded.model):
        return forward(loaded, prompt), inside.short


def masked_logits(loaded, prompt, stays):
    """All tokens, of which layers from K on see only those that stay."""

    def hide(layer, args, keywords):
        length = len(stays)
        seen = torch.ones(length, length, dtype=torch.bool).tril() & stays
        seen |= torch.eye(length, dtype=torch.bool)
        mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        return args, {**keywords, "attention_mask": mask}

    layers = loaded.model.model.language_model.layers[K:]
    hooks = [layer.register_forward_pre_hook(hide, with_kwargs=True) for layer in layers]
    try:
        return forward(loaded, prompt).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


def kept_mask(prompt, kept):
    """Return the mask [L] of the tokens that stay; what follows the prompt that was pruned stays too."""
    stays = torch.ones(len(prompt), dtype=torch.bool)
    stays[: int(kept.index.max())] = False
    stays[kept.index[0]] = True
    return stays


def places_of_tokens(name, loaded, prompt):
    """Return the places of visual tokens and of newlines, which on LLaVA-OneVision stand behind each video."""
    places = (prompt.input_ids == read_placeholder(loaded.model.config)[1]).nonzero()[:, 0]
    ends = torch.tensor([len(v.index) + 1 for v in prompt.visuals]).cumsum(0) - 1
    newlines = torch.isin(torch.arange(len(places)), ends) & (name == "tiny")
    return places[~newlines], places[newlines]


def test_the_row_of_attention_is_that_of_the_eager_kernel(name, deep, prompts):
    eager, fast = (load_language_model(deep, choose_runtime("cpu", "float32", attn)) for attn in ("eager", "sdpa"))
    rows = []
    for prompt in prompts:
        weights = forward(eager, prompt, output_attentions=True).attentions[K - 1]
        fast.generate([prompt], [GREEDY], inside=(Seeing(rows=rows), RATIO))
        places, _ = places_of_tokens(name, fast, prompt)
        torch.testing.assert_close(rows[-1], weights[0, :, -1].mean(0)[places], atol=5e-6, rtol=0)
    assert len(rows) == len(prompts)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in RECURRENT], scope="module")
def test_dropping_before_a_layer_equals_masking_from_there_on_and_text_stays(name, loaded, prompts):
    for prompt in prompts:
        output, kept = pruned_forward(loaded, prompt)
        stays = kept_mask(prompt, kept)
        torch.testing.assert_close(output.logits[0], masked_logits(loaded, prompt, stays)[stays], atol=2e-5, rtol=0)
        lengths = [output[CACHE].get_seq_length(layer) for layer in range(LAYERS)]  # of keys and values
        assert lengths == [len(prompt)] * K + [kept.index.shape[1]] * (LAYERS - K)
        places, newlines = places_of_tokens(name, loaded, prompt)
        assert stays[places].sum() == round(RATIO * sum(len(visual.index) for visual in prompt.visuals))
        assert len(newlines) == (len(prompt.visuals) if name == "tiny" else 0)
        stays[places] = True
        assert stays.all()  # text and newlines


def test_a_ragged_batch_gives_what_single_runs_give_and_all_tokens_what_the_model_does(loaded, prompts):
    plain = ids_of(loaded.generate(prompts, [GREEDY] * 3))
    assert ids_of(loaded.generate(prompts, [GREEDY] * 3, inside=(FastV(K=K), 1.0))) == plain
    together = ids_of(loaded.generate(prompts, [GREEDY] * 3, inside=(FastV(K=K), RATIO)))
    assert together == [loaded.generate([p], [GREEDY], inside=(FastV(K=K), RATIO))[0].token_ids for p in prompts]
    assert together != plain
    assert ids_of(loaded.generate(prompts, [GREEDY] * 3, inside=(Attended(), RATIO))) == together


def test_generation_goes_on_as_the_pruned_prompt_says(loaded, prompts):
    """Each next token is the likeliest after prompt and answer so far, of which layers from K on see what was kept."""
    (answer,) = loaded.generate(prompts[:1], [GREEDY], inside=(FastV(K=K), RATIO))
    prompt = prompts[0]
    _, kept = pruned_forward(loaded, prompt)
    for token in answer.token_ids:
        assert int(masked_logits(loaded, prompt, kept_mask(prompt, kept))[-1].argmax()) == token
        prompt = continue_prompt(prompt, torch.tensor([token]))


def test_continuations_are_scored_on_what_was_kept(loaded, prompts):
    texts = [["A", "two people", "a car that moves"], ["B"], ["the first one", "C"]]
    scores = loaded.score(prompts, texts, inside=(FastV(K=K), RATIO))
    for prompt, row, continuations in zip(prompts, scores, texts, strict=True):
        _, kept = pruned_forward(loaded, prompt)
        for score, text in zip(row, continuations, strict=True):
            ids = torch.tensor(loaded.tokenizer(text).input_ids)
            whole = continue_prompt(prompt, ids)
            logits = masked_logits(loaded, whole, kept_mask(whole, kept))
            logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
            assert score.logprob == pytest.approx(float(logprobs.gather(-1, ids[:, None]).sum()), abs=1e-4)


def test_no_hook_stays_behind(loaded, prompts):
    inside = loaded._prune_inside(prompts, FastV(K=K), RATIO)
    with pytest.raises(RuntimeError, match="stop"), inside.apply_hooks(loaded.model):
        raise RuntimeError("stop")
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in loaded.model.model.language_model.layers.modules())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attended(Pruner):
    """A method of one's own that prunes before a layer, and does what FastV does under other names."""

    name: ClassVar[str] = "attended"
    nested: ClassVar[bool] = False
    cacheable: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})

    depth: int = K

    @property
    def layer(self) -> int:
        return self.depth

    def select(self, visual, budget, ratio, seed):
        attention_M = visual.evidence["llm_attention"]
        assert visual.tokens.shape[:2] == (1, len(attention_M)) and set(visual.evidence) == {"llm_attention"}
        assert visual.tokens.any()  # what the layer before sees of them
        assert budget == budget_for(ratio, len(attention_M))
        return Selection(attention_M.argsort(descending=True, stable=True)[: round(ratio * len(attention_M))])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seeing(Attended):
    """Keeps the rows of attention that it is given, and returns ``indices``, if any, whatever is asked for."""

    rows: list = dataclasses.field(default_factory=list)
    indices: tuple = ()

    def select(self, visual, budget, ratio, seed):
        self.rows.append(visual.evidence["llm_attention"])
        return Selection(torch.tensor(self.indices)) if self.indices else super().select(visual, budget, ratio, seed)


class Greedy(Attended):
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention", "token_key"})


class Merging(Attended):
    merges: ClassVar[bool] = True


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-vl"], scope="module")
@pytest.mark.parametrize(
    ("method", "why"),
    [
        (Random(), "random prunes before layer None: inside a model it must be at least 1"),
        (Attended(depth=5), "attended with depth=5 prunes before layer 5; this model has 5 layers"),
        (Greedy(), "needs token_key"),
        (Merging(), "merges tokens: inside a model tokens can only be dropped"),
    ],
)
def test_what_cannot_prune_inside_of_a_model_is_refused(name, loaded, method, why):
    with pytest.raises(ValueError, match=why):
        check_prune_layer(method, loaded.model.config)
    assert check_prune_layer(Attended(depth=4), loaded.model.config) == 4
    if name == "tiny-qwen3-vl":
        with pytest.raises(ValueError, match="at least 3"):
            check_prune_layer(FastV(K=2), loaded.model.config)


@pytest.mark.parametrize("indices", [(3, 3), (0, 10**6), (-1,)])
def test_a_selection_that_cannot_be_kept_is_refused_inside_too(loaded, prompts, indices):
    with pytest.raises(WrongSelection, match="method 'attended' must return different indices in"):
        loaded.generate(prompts[:1], [GREEDY], inside=(Seeing(indices=indices), RATIO))


@pytest.mark.parametrize("model", RECURRENT)
def test_a_model_with_linear_attention_is_refused_by_name(model):
    with pytest.raises(ValueError, match=r"fastv .* has layers of linear attention"):
        check_prune_layer(FastV(K=2), llm(model).model.config)
