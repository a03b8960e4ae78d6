"""An LLM on cached tokens says exactly what the stock model says on pixels; dropping a token equals masking it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from gstep.backbones import ModelSource, choose_runtime
from gstep.checkpoints import tiny
from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError
from gstep.language import Decoding, load_language_model, model, prompt_builder
from gstep.language.batch import Batch, encoder_outputs
from gstep.language.decoding import SeededSampling
from gstep.language.prompt import parsed_config
from gstep.language.weights import without_vision
from tests.gstep.llms import FAMILIES, FLOAT32, encode, kept_index, llm, stock, stock_inputs
from tests.gstep.qwen_configs import SIZES
from tests.gstep.reading import count_reading

QUESTION = "What is happening in this video?"
GREEDY = Decoding(max_new_tokens=12)


@pytest.fixture(scope="module", params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def video(name):
    return encode(name)


@pytest.fixture(scope="module")
def source(name):
    return ModelSource.resolve(name)


def ids_of(answers):
    return [answer.token_ids for answer in answers]


def stock_greedy(name, inputs, n=GREEDY.max_new_tokens, **more):
    """The ids the stock model generates, without the token that ends them."""
    with torch.no_grad():
        output = stock(name).generate(**inputs, do_sample=False, max_new_tokens=n, **more)
    ends = stock(name).generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[:stop])


def full_positions(prompt):
    """As the stock forward takes them."""
    return prompt.positions if len(prompt.positions) == 1 else prompt.positions[:, None]


def test_all_tokens_give_the_logits_of_the_stock_model_on_pixels(name, source, video):
    prompt = prompt_builder(source).build(QUESTION, [video.visual])
    inputs = stock_inputs(name, prompt, video)
    with torch.no_grad():
        expected = stock(name)(**inputs).logits[0]
    (logits,) = llm(name).logits([prompt])
    assert (logits - expected).abs().max() == 0
    (answer,) = llm(name).generate([prompt], [GREEDY])
    assert answer.token_ids == stock_greedy(name, inputs)


def test_what_bfloat16_storage_changes_stays_small(name, source, video):
    stored = dataclasses.replace(
        video.visual,
        tokens=video.visual.tokens.bfloat16(),
        deepstack=tuple(level.bfloat16() for level in video.visual.deepstack),
    )
    build = prompt_builder(source).build
    exact, rounded = (
        llm(name).logits([build(QUESTION, [video.visual])])[0],
        llm(name).logits([build(QUESTION, [stored])])[0],
    )
    assert 0 < (exact - rounded).abs().max() < 0.15  # measured: 0.03 to 0.08, of logits whose deviation is 2


def masked(name, source, video, index, question=QUESTION):
    """The unpruned prompt, the pruned one, and the mask [1,L] of the unpruned one that leaves the same tokens."""
    builder = prompt_builder(source, "original")
    whole, pruned = builder.build(question, [video.visual]), builder.build(question, [video.keep(index)])
    places = (whole.input_ids == stock(name).config.video_token_id).nonzero()[:, 0]
    mask = torch.ones(len(whole), dtype=torch.long)
    mask[places[: len(video.visual.index)]] = 0
    mask[places[index]] = 1  # LLaVA-OneVision has the newline behind these
    return whole, pruned, mask[None]


def test_dropping_tokens_equals_masking_them(name, source, video):
    whole, pruned, mask = masked(name, source, video, kept_index(video, 0.25))
    inputs = stock_inputs(name, whole, video) | {"attention_mask": mask}
    with torch.no_grad():
        expected = stock(name)(**inputs, position_ids=full_positions(whole)).logits[0][mask[0].bool()]
    (logits,) = llm(name).logits([pruned])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    generation_ids = Batch.of([whole]).position_ids()
    (answer,) = llm(name).generate([pruned], [GREEDY])
    assert answer.token_ids == stock_greedy(name, inputs, position_ids=generation_ids)


def test_contiguous_positions_are_another_policy(name, source, video):
    index = kept_index(video, 0.25)
    original, contiguous = (
        llm(name).logits([prompt_builder(source, positions).build(QUESTION, [video.keep(index)])])[0]
        for positions in ("original", "contiguous")
    )
    assert (original - contiguous).abs().max() > 0.5


def test_what_a_call_before_left_in_the_model_does_not_matter(name, source, video):
    prompt = prompt_builder(source).build(QUESTION, [video.keep(kept_index(video, 0.25))])
    before = ids_of(llm(name).generate([prompt], [GREEDY]))
    llm(name).model.model.rope_deltas = torch.tensor([[977]])
    assert ids_of(llm(name).generate([prompt], [GREEDY])) == before


def ragged(source, video, other):
    """Prompts of different kept counts, lengths and numbers of videos; the first two share theirs."""
    few, fewer = video.keep(kept_index(video, 0.25)), other.keep(kept_index(other, 0.03))
    build = prompt_builder(source).build
    return [
        build(QUESTION, [few]),
        build("How many people are there, and what colour is the car?", [few]),
        build("Why?", [fewer]),
        build("Which of the two is longer?", [fewer, few]),
    ]


@pytest.fixture(scope="module")
def prompts(name, source, video):
    return ragged(source, video, encode(name, "carphone_pristine.mp4", n_frames=2, grid=(4, 10)))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_ragged_batch_gives_what_single_runs_give(name, prompts, share_prefix):
    decodings = [Decoding(max_new_tokens=n) for n in (12, 3, 12, 7)]
    answers = llm(name).generate(prompts, decodings, share_prefix=share_prefix)
    single = [llm(name).generate([p], [d])[0] for p, d in zip(prompts, decodings, strict=True)]
    assert ids_of(answers) == ids_of(single)
    assert [a.finish for a in answers] == [a.finish for a in single]
    for answer, decoding in zip(answers, decodings, strict=True):
        assert (answer.finish == "length") == (len(answer.token_ids) == decoding.max_new_tokens)
    assert answers[1].finish == "length"  # so one row ends before the others
    batched = llm(name).logits(prompts)
    for prompt, logits in zip(prompts, batched, strict=True):
        torch.testing.assert_close(logits, llm(name).logits([prompt])[0], atol=2e-5, rtol=0)


def test_questions_on_one_video_go_through_it_once(name, prompts, monkeypatch):
    seen = []
    forward = llm(name).model.forward

    def counted(*args, input_ids, **keywords):
        seen.append(input_ids.numel())
        return forward(*args, input_ids=input_ids, **keywords)

    monkeypatch.setattr(llm(name).model, "forward", counted)
    one = [Decoding(max_new_tokens=1)] * 2
    llm(name).generate(prompts[:2], one)
    shared, prefix = sum(seen), prompts[0].prefix_length
    tails = max(len(prompt) - prefix for prompt in prompts[:2])
    assert shared == prefix + 2 * tails
    seen.clear()
    llm(name).generate(prompts[:2], one, share_prefix=False)
    assert sum(seen) == 2 * (prefix + tails)


def test_only_what_is_the_same_is_shared(name, source, video):
    """Another system message, other positions of as many tokens, or another video of the same size."""
    builder, question = prompt_builder(source, "original"), "Why?"
    some, others = video.keep(torch.arange(9)), video.keep(torch.arange(30, 39))
    louder = dataclasses.replace(some, tokens=-3 * some.tokens)
    prompts = [
        builder.build(question, [some]),
        builder.build(question, [some], system="Be brief."),
        builder.build(question, [others]),
        builder.build(question, [louder]),
        prompt_builder(source, "contiguous").build(question, [some]),
    ]
    together = llm(name).generate(prompts, [GREEDY] * len(prompts))
    alone = [llm(name).generate([p], [GREEDY])[0].token_ids for p in prompts]
    assert ids_of(together) == alone
    assert alone[3] != alone[0]  # else this could not fail


def test_a_batch_is_padded_on_the_left_with_a_token_of_the_prompt(prompts):
    batch = Batch.of(prompts)
    for row, prompt in enumerate(prompts):
        start = batch.mask.shape[1] - len(prompt)
        assert batch.mask[row].tolist() == [0] * start + [1] * len(prompt)
        assert torch.equal(batch.input_ids[row, start:], prompt.input_ids)
        assert torch.equal(batch.positions[:, row, start:], prompt.positions)
        assert (batch.input_ids[row, :start] == prompt.input_ids[0]).all()


def test_no_positions_look_like_packed_sequences(name, prompts):
    """Transformers takes a first row that does not count up by one for several sequences and masks them apart."""
    batch = Batch.of(prompts)
    ids = batch.position_ids()
    if name == "tiny":
        assert torch.equal(ids, batch.positions[0])
    else:
        assert torch.equal(ids[1:], batch.positions)
        for row, mask in zip(ids[0], batch.mask.bool(), strict=True):
            assert torch.equal(row[mask], torch.arange(int(mask.sum())))


def test_a_drawn_answer_depends_on_its_own_seed_alone(name, prompts):
    def decodings(*seeds):
        return [Decoding(max_new_tokens=8, temperature=0.9, top_p=0.95, top_k=50, seed=seed) for seed in seeds]

    together = llm(name).generate([*prompts, prompts[0], prompts[0]], [*decodings(0, 1, 2, 3, 4), GREEDY])
    alone = [llm(name).generate([p], [d])[0] for p, d in zip(prompts, decodings(0, 1, 2, 3), strict=True)]
    assert ids_of(together[:4]) == ids_of(alone)
    assert together[4].token_ids != together[0].token_ids
    assert together[5].token_ids == llm(name).generate([prompts[0]], [GREEDY])[0].token_ids


def test_draws_follow_the_distribution(name, prompts):
    probabilities = torch.softmax(llm(name).logits([prompts[2]])[0][-1] / 0.8, dim=-1)
    top = set(torch.topk(probabilities, 3).indices.tolist())
    draws = [
        a.token_ids[0]
        for start in range(0, 600, 50)
        for a in llm(name).generate(
            [prompts[2]] * 50,
            [Decoding(max_new_tokens=1, temperature=0.8, top_k=3, seed=start + i) for i in range(50)],
        )
        if a.token_ids
    ]
    assert set(draws) <= top
    kept = probabilities[sorted(top)] / probabilities[sorted(top)].sum()
    for token, share in zip(sorted(top), kept.tolist(), strict=True):
        assert abs(draws.count(token) / len(draws) - share) < 0.07


def drawn(scores, seeds=range(300), **options):
    """What some seeds draw of one row of scores."""
    rows = torch.tensor([scores])
    return {
        int(SeededSampling([Decoding(seed=seed, **options)])(torch.zeros(1, 1, dtype=torch.long), rows).argmax())
        for seed in seeds
    }


@pytest.mark.parametrize(("temperature", "share"), [(0.5, 0.881), (1.0, 0.731), (4.0, 0.562)])
def test_the_temperature_divides_the_logits(temperature, share):
    draws = [drawn([0.0, 1.0], range(i, i + 1), temperature=temperature) for i in range(1000)]
    assert draws.count({1}) / 1000 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-7])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5, "top_k": 2}])
def test_next_to_no_temperature_is_greedy(temperature, options):
    assert drawn([30.0, -5.0, 31.0, 29.0], seeds=range(20), temperature=temperature, **options) == {2}


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_any_heat_leaves_what_the_model_rules_out(temperature):
    assert drawn([30.0, float("-inf"), -31.0], temperature=temperature) == {0, 2}


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.6, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_only_the_likeliest_that_make_up_top_p_are_drawn(top_p, kept):
    logits = torch.tensor([0.2, 0.4, 0.3, 0.1]).log().tolist()
    assert drawn(logits, temperature=1.0, top_p=top_p) == kept


@pytest.mark.parametrize("share_prefix", [True, False])
def test_continuations_are_scored_as_the_whole_text_would_be(name, prompts, share_prefix):
    choices = [["A", "B"], ["a white car", "yes", "two people who talk"], ["no"], ["the first", "the second"]]
    scores = llm(name).score(prompts, choices, share_prefix=share_prefix)
    for prompt, texts, row in zip(prompts, choices, scores, strict=True):
        for text, score in zip(texts, row, strict=True):
            ids = torch.tensor(llm(name).tokenizer(text).input_ids)
            assert score.n_tokens == len(ids)
            new = prompt.positions[:, -1:] + 1 + torch.arange(len(ids))
            whole = dataclasses.replace(
                prompt,
                input_ids=torch.cat([prompt.input_ids, ids]),
                positions=torch.cat([prompt.positions, new.expand(len(prompt.positions), -1)], dim=1),
            )
            logprobs = torch.log_softmax(llm(name).logits([whole])[0], dim=-1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(-1, ids[:, None]).sum()
            assert score.logprob == pytest.approx(float(expected), abs=1e-4)


def test_long_prompts_are_not_copied_for_all_choices_at_once(name, prompts, monkeypatch):
    choices = [["a white car", "A", "two people who talk", "neither of them", "a tree"]]
    expected = [score.logprob for score in llm(name).score(prompts[:1], choices)[0]]
    seen = []
    forward = llm(name).model.forward

    def counted(*args, input_ids, **keywords):
        seen.append(len(input_ids))
        return forward(*args, input_ids=input_ids, **keywords)

    monkeypatch.setattr(llm(name).model, "forward", counted)
    monkeypatch.setattr(model, "COPIED_TOKENS", 3 * len(prompts[0]))
    scores = llm(name).score(prompts[:1], choices)[0]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-4)
    assert seen == [1, 3, 1]  # the prompt, then the four choices of several tokens


def test_an_empty_continuation_is_refused(name, prompts):
    with pytest.raises(ValueError, match="at least one character"):
        llm(name).score(prompts[:1], [["A", ""]])


def test_two_videos_in_one_prompt_equal_the_stock_model(name, source, video):
    grid = (8, 12) if name == "tiny" else (6, 10)
    other = encode(name, "carphone_pristine.mp4", n_frames=3, grid=grid)
    prompt = prompt_builder(source).build("Which one is longer?", [video.visual, other.visual])
    inputs = stock_inputs(name, prompt, video, other)
    with torch.no_grad():
        expected = stock(name)(**inputs).logits[0]
    (logits,) = llm(name).logits([prompt])
    # The stock tower takes both videos in one product, whose rows a CPU may round otherwise than those of one video's.
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_nothing_of_the_vision_part_is_read_or_held(name, source, monkeypatch):
    read = count_reading(monkeypatch)
    loaded = load_language_model(source, FLOAT32)
    vision = ("vision_tower", "multi_modal_projector", "image_newline", "visual")
    assert not [key for key in read if any(part in key for part in vision)]
    text = sum(p.nbytes for key, p in stock(name).named_parameters() if not any(part in key for part in vision))
    buffers = sum(b.nbytes for b in loaded.model.buffers())
    assert sum(read.values()) == text == loaded.n_bytes - buffers
    assert not any(t.is_meta or t.requires_grad for t in (*loaded.model.parameters(), *loaded.model.buffers()))
    assert not loaded.model.training


@pytest.fixture
def folder(name, tmp_path):
    return Path(shutil.copytree(tiny.build(name), tmp_path / "model"))


def prompt_logits(source, name, video):
    loaded = load_language_model(source, FLOAT32)
    return loaded.logits([prompt_builder(source).build(QUESTION, [video.visual])])[0]


def test_what_save_pretrained_writes_loads(name, folder, video):
    expected = llm(name).logits([prompt_builder(ModelSource.resolve(folder)).build(QUESTION, [video.visual])])[0]
    (folder / "model.safetensors").unlink()
    stock(name).save_pretrained(folder, max_shard_size="300KB")
    saved = ModelSource.resolve(folder)
    assert len(saved.weight_files) > 1
    assert torch.equal(prompt_logits(saved, name, video), expected)


def test_keys_as_they_are_in_memory_load(name, folder, video, source):
    save_file(
        {key: value.contiguous() for key, value in stock(name).state_dict().items()}, folder / "model.safetensors"
    )
    assert torch.equal(prompt_logits(ModelSource.resolve(folder), name, video), prompt_logits(source, name, video))


def test_a_tied_head_is_the_embedding(name, folder, video):
    tensors = load_file(folder / "model.safetensors")
    head = next(key for key in tensors if key.endswith("lm_head.weight"))
    embedding = next(key for key in tensors if key.endswith("embed_tokens.weight"))
    tensors[head] = tensors[embedding].clone()
    save_file(tensors, folder / "model.safetensors")
    expected = prompt_logits(ModelSource.resolve(folder), name, video)
    del tensors[head]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load_language_model(ModelSource.resolve(folder), FLOAT32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tied = ModelSource.resolve(folder)
    loaded = load_language_model(tied, FLOAT32)
    assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight
    assert torch.equal(prompt_logits(tied, name, video), expected)


def test_missing_weights_are_named(name, folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: t for k, t in tensors.items() if not k.endswith("layers.1.mlp.up_proj.weight")},
        folder / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_language_model(ModelSource.resolve(folder), FLOAT32)


def test_half_precision_is_the_stock_models(name, source, video, prompts):
    loaded = load_language_model(source, choose_runtime("cpu", "bfloat16", "sdpa"))
    whole = AutoModelForImageTextToText.from_pretrained(source.pretrained()[0], dtype=torch.bfloat16).eval()
    prompt = prompt_builder(source).build(QUESTION, [video.visual])
    with torch.no_grad():
        outputs = encoder_outputs(prompt.visuals, "cpu", torch.bfloat16)
        ids, positions = prompt.input_ids[None], Batch.of([prompt]).position_ids()
        expected = whole(
            input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, mm_encoder_outputs=outputs
        ).logits[0]
    assert torch.equal(loaded.logits([prompt])[0], expected) and expected.dtype == torch.bfloat16
    answers = loaded.generate(prompts, [GREEDY] * len(prompts))
    assert all(a.token_ids for a in answers)
    assert all(a.prefill_s > 0 and a.decode_s > 0 for a in answers)


def test_a_repetition_penalty_of_the_checkpoint_holds_and_sees_no_padding(name, folder, prompts):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.7}))
    loaded = load_language_model(ModelSource.resolve(folder), FLOAT32)
    together = loaded.generate(prompts, [GREEDY] * 4)
    assert ids_of(together) == [loaded.generate([p], [GREEDY])[0].token_ids for p in prompts]
    assert ids_of(together) != ids_of(llm(name).generate(prompts, [GREEDY] * 4))


def test_how_the_checkpoint_would_draw_does_not_matter(name, folder, prompts):
    path = folder / "generation_config.json"
    drawing = {"do_sample": True, "temperature": 1e-6, "top_k": 1, "top_p": 0.001, "num_return_sequences": 2}
    path.write_text(json.dumps({**json.loads(path.read_text()), **drawing}))
    loaded = load_language_model(ModelSource.resolve(folder), FLOAT32)
    assert ids_of(loaded.generate(prompts, [GREEDY] * 4)) == ids_of(llm(name).generate(prompts, [GREEDY] * 4))
    # Transformers warns of what greedy decoding ignores, in every process.
    left = loaded.model.generation_config
    assert (left.do_sample, left.temperature, left.top_k, left.top_p) == (None,) * 4


def test_the_end_of_an_answer_is_looked_up_in_the_config_where_it_is_not_set(name, folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"pad_token_id": 0}))
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["eos_token_id"] = 77
    (folder / "config.json").write_text(json.dumps(config))
    for _ in ("a file that does not say", "no file"):
        assert load_language_model(ModelSource.resolve(folder), FLOAT32).model.generation_config.eos_token_id == 77
        path.unlink(missing_ok=True)


def test_a_library_that_would_ignore_cached_tokens_is_refused(name, source, monkeypatch):
    def older(self, input_ids=None, **keywords):
        pass

    monkeypatch.setattr(type(llm(name).model), "forward", older)
    with pytest.raises(ModelError, match=r"takes no cached tokens: pip install 'transformers>=5\.18"):
        load_language_model(source, FLOAT32)


def llava_config(hidden, layers, heads, kv, inner, tied):
    """What decides the language model in the config.json of LLaVA-OneVision on the hub."""
    text = {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "vocab_size": 152000 if tied else 152128,
        "tie_word_embeddings": tied,
    }
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 26, "image_size": 384}
    return {"model_type": "llava_onevision", "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


LLMS = {
    "LLaVA-OneVision-0.5B": llava_config(896, 24, 14, 2, 4864, tied=True),
    "LLaVA-OneVision-7B": llava_config(3584, 28, 28, 4, 18944, tied=False),
    **{size: config for size, (config, _, _) in SIZES.items()},
}
# Millions of parameters without the vision part, and whether the head is tied to the embeddings.
LANGUAGE_PARTS = {
    "LLaVA-OneVision-0.5B": (494, True),
    "LLaVA-OneVision-7B": (7616, False),
    "Qwen2.5-VL-3B": (3086, True),
    "Qwen2.5-VL-7B": (7615, False),
    "Qwen2.5-VL-32B": (32763, False),
    "Qwen2.5-VL-72B": (72704, False),
    "Qwen3-VL-2B": (1721, True),
    "Qwen3-VL-4B": (4022, True),
    "Qwen3-VL-8B": (8191, False),
    "Qwen3-VL-32B": (32762, False),
}


@pytest.mark.parametrize("size", LLMS)
def test_every_dense_size_on_the_hub_is_known_by_its_config(size):
    config = LLMS[size]
    source = ModelSource(size, config["model_type"], "none", CheckpointFiles("folder", "/none"), (), config, {})
    model = without_vision(parsed_config(source), choose_runtime("cpu", "bfloat16", "sdpa"))
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    millions = round(sum(p.numel() for p in model.parameters()) / 1e6)
    assert (millions, model.lm_head is None) == LANGUAGE_PARTS[size]
