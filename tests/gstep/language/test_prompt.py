"""Prompts and positions of kept tokens, chat templates, and drawn answers."""

import dataclasses
import json
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.examples.family.prompts import PatchesPrompts
from gstep.language import Decoding, PromptPolicy, prompt_builder, rendering
from gstep.language.decoding import SeededSampling
from gstep.language.prompt import chat_template
from gstep.language.types import read_placeholder
from tests.gstep.language.prompts import QWEN, builder, text_of, video
from tests.gstep.llms import FAMILIES, GREEDY, KINDS, ids_of, llm, stock
from tests.gstep.synthetic import defaults


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kept_tokens_stand_where_they_stood(name):
    whole_video = video(name)
    index = [0, 1, whole_video.tokens_per_frame + 7, 3 * whole_video.tokens_per_frame, len(whole_video.index) - 1]
    make = builder(name, "original").build
    whole, pruned = make("And then?", [whole_video]), make("And then?", [video(name, index=index)])
    again = pickle.loads(pickle.dumps(builder(name, "original")))  # noqa: S301 - our own bytes
    assert torch.equal(again.build("And then?", [whole_video]).positions, whole.positions)
    places = (whole.input_ids == read_placeholder(stock(name).config)[1]).nonzero()[:, 0]
    keep = torch.ones(len(whole), dtype=torch.bool)
    keep[places[: len(whole_video.index)]] = False
    keep[places[torch.tensor(index)]] = True
    assert torch.equal(pruned.input_ids, whole.input_ids[keep])
    assert torch.equal(pruned.positions, whole.positions[:, keep])
    assert pruned.extent == max(len(pruned), int(whole.positions.max()) + 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_contiguous_positions_count_what_is_there(name):
    prompt = builder(name, "contiguous").build("And then?", [video(name, index=[3, 30, 77]), video(name, index=[9])])
    assert torch.equal(prompt.positions, torch.arange(len(prompt)).expand(len(prompt.positions), -1))


def test_the_examples_prompts_count_on_one_axis():
    prompts = PatchesPrompts.of(ModelSource.resolve("tiny"), None, "transformers-5", "true")
    prompt = prompts.build("Why?", [video("tiny", index=[3, 9])])
    assert torch.equal(prompt.positions, torch.arange(len(prompt))[None])


def test_the_default_is_contiguous_for_llava_and_original_for_qwen():
    assert [builder(name).policy.positions for name in FAMILIES] == ["contiguous", *["original"] * 5, "contiguous"]
    assert builder("tiny").policy.describe().keys() == {"positions", "rule", "chat_template"}


@pytest.mark.parametrize("name", FAMILIES)
def test_where_frames_get_their_times_from_is_told_only_where_prompts_tell_times(name):
    true, stock = (builder(name, frame_times=times) for times in ("true", "stock"))
    described = true.policy.describe()
    assert "frame_times" not in described  # answers from before there were others are asked for so again
    tells = name.startswith("tiny-qwen3")
    assert stock.policy.describe() == ({**described, "frame_times": "stock"} if tells else described)
    if not tells:
        plain, same = (maker.build("Why?", [video(name)]) for maker in (true, stock))
        assert torch.equal(plain.input_ids, same.input_ids) and torch.equal(plain.positions, same.positions)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_placeholder_in_a_question_is_text_and_cannot_pass_for_a_video(name):
    videos, maker = [video(name, index=[0])], builder(name)
    for kind in ("video", "image"):
        token = f"<{kind}>" if name == "tiny" else f"<|{kind}_pad|>"
        prompt = maker.build(f"What is a {token}, and {token}{token}?", videos, system=f"Say {token}.")
        text = maker.tokenizer.decode(prompt.input_ids)
        assert text.startswith("<|im_start|>system") and "helpful" not in text
        assert f"What is a {token}, and {token}{token}?" in text and f"Say {token}." in text
        ids = {maker.placeholder_id, maker.config.image_token_id}
        assert sum(i in ids for i in prompt.input_ids.tolist()) == maker.n_visual(videos)
        without = maker.build("What?", videos)
        assert prompt.spans[0][1] - prompt.spans[0][0] == without.spans[0][1] - without.spans[0][0]
    with pytest.raises(ValueError, match=r"U\+10FFFE"):
        maker.build("a \U0010fffe", videos)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_another_model_are_refused(name):
    narrow = dataclasses.replace(video(name, index=[0]), tokens=torch.zeros(1, 32))
    with pytest.raises(ValueError, match="width 32; this model takes 64"):
        builder(name).build("Why?", [narrow])
    wrong = "tiny-qwen2-5-vl" if name.startswith("tiny-qwen3-vl") else "tiny-qwen3-vl"
    with pytest.raises(ValueError, match="deepstack levels"):
        builder(name).build("Why?", [video(wrong, index=[0])])


def test_a_cache_without_what_the_family_needs_is_refused():
    without_newline = dataclasses.replace(video("tiny", index=[0]), newline=None)
    with pytest.raises(ValueError, match="newline"):
        builder("tiny").build("Why?", [without_newline])
    grids = [(name, "video_grid_thw") for name in QWEN]
    for name, lost in (*grids, (QWEN[0], "second_per_grid_ts"), (QWEN[1], "patch_timestamps")):
        clip = video(name, index=[0])
        less = dataclasses.replace(clip, extra={k: v for k, v in clip.extra.items() if k != lost})
        with pytest.raises(ValueError, match="prune"):
            builder(name).build("Why?", [less])
    with pytest.raises(ValueError, match="does not fit"):
        builder(QWEN[0]).build("Why?", [dataclasses.replace(video(QWEN[0]), n_frames=4)])


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_in_order_of_selection_do_not_get_into_wrong_frames(name):
    """A prompt with a text before each frame takes tokens by ascending index: others would get other frames' times."""
    clip, maker = video(name, n_frames=2, index=[30, 3, 27, 8]), builder(name, "original")
    if name not in ("tiny", "tiny-qwen2-5-vl"):
        with pytest.raises(ValueError, match='read them with order="index"'):
            maker.build("Why?", [clip])
        return
    prompt = maker.build("Why?", [clip])
    rising = maker.build("Why?", [video(name, n_frames=2, index=[3, 8, 27, 30])])
    at, order = (prompt.input_ids == maker.placeholder_id).nonzero()[:4, 0], torch.tensor([3, 0, 2, 1])
    assert torch.equal(prompt.positions[:, at], rising.positions[:, at[order]])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: builder("tiny", "odd"), "unknown positions 'odd'; known: contiguous, original"),
        (lambda: PromptPolicy("original", "transformers-3"), "unknown rule"),
        (lambda: PromptPolicy("original", thought="shut"), "unknown thought 'shut'; known: open, closed"),
        (lambda: builder("tiny", frame_times="guessed"), "unknown frame_times 'guessed'; known: true, stock"),
        (lambda: Decoding(max_new_tokens=0), "max_new_tokens"),
        *((lambda value=value: Decoding(temperature=value), "temperature") for value in (-1.0, float("nan"))),
        (lambda: Decoding(top_p=0.0), "top_p"),
        (lambda: Decoding(top_k=-1), "top_k"),
        (lambda: Decoding(seed=-1), "seed"),
    ],
)
def test_unknown_policies_and_options_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def write_template(folder: Path, filename: str, template: object) -> None:
    """Put a chat template into a file of a checkpoint; of a JSON file the other settings stay."""
    path = folder / filename
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".json":
        settings = json.loads(path.read_text()) if path.exists() else {}
        template = json.dumps({**settings, "chat_template": template})
    path.write_text(template)


NAMES = ("tiny",)
TEMPLATE_FILES = (
    *("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json"),
    *("additional_chat_templates/other.jinja", "additional_chat_templates/default.jinja"),
)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_of_several_chat_templates_the_one_counts_that_transformers_takes(folder, count):
    (folder / "chat_template.jinja").unlink()
    for number, filenames in enumerate(combinations(TEMPLATE_FILES, count)):
        checkpoint = shutil.copytree(folder, folder.with_name(f"model-{number}"))
        for filename in filenames:
            write_template(checkpoint, filename, f"of {filename}")
        try:
            settings, _ = ProcessorMixin.get_processor_dict(str(checkpoint))
            stock = settings.get("chat_template") or AutoTokenizer.from_pretrained(checkpoint).get_chat_template()
            stock = stock if isinstance(stock, str) else stock["default"]
        except (ValueError, KeyError):  # several files that do not go together, no default, or no template at all
            with pytest.raises(ModelError, match=r"chat.template"):
                chat_template(ModelSource.resolve(checkpoint))
        else:
            assert chat_template(ModelSource.resolve(checkpoint)) == stock, filenames


@pytest.mark.parametrize("filename", TEMPLATE_FILES[:2] + TEMPLATE_FILES[3:4])
def test_of_a_list_of_chat_templates_the_default_counts(folder, filename):
    (folder / "chat_template.jinja").unlink()
    entries = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_template(folder, filename, entries)
    assert chat_template(ModelSource.resolve(folder)) == "plain"
    write_template(folder, filename, entries[:1])
    with pytest.raises(ModelError, match="no chat template"):
        chat_template(ModelSource.resolve(folder))


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filters": "{% for i in range(99999) %}{{ range(99999)|map('string')|map('length')|sum }}{% endfor %}",
    "memory": "{% set ns = namespace(x='a' * 4096) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "one step": "{{ 9 ** 9 ** 9 }}",
    "too large": "{{ 'a' * 10000000000000000 }}",
    "recursion": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_chat_template_that_does_not_end_is_refused_in_any_thread(folder, template, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 0.1)
    monkeypatch.setattr(rendering, "MAX_RENDER_BYTES", 2**24)
    write_template(folder, "chat_template.jinja", template)
    tracer = sys.gettrace()
    with pytest.raises(ModelError, match="goes beyond a limit"):
        prompt_builder(ModelSource.resolve(folder))
    assert sys.gettrace() is tracer
    if template == ENDLESS["loops"]:
        with ThreadPoolExecutor(1) as pool, pytest.raises(ModelError, match="goes beyond a limit"):
            pool.submit(prompt_builder, ModelSource.resolve(folder)).result()


def test_a_chat_template_that_ends_for_some_questions_alone_fails_for_the_others(folder, monkeypatch):
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 0.2)
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(f"{{% if messages|length > 1 %}}{ENDLESS['loops']}{{% endif %}}")
    maker = prompt_builder(ModelSource.resolve(folder))
    assert maker.build("Why?", [video("tiny")])
    with pytest.raises(ModelError, match=r"goes beyond a limit \(0\.2 s of CPU time have passed\)"):
        maker.build("Why?", [video("tiny")], system="Be brief.")


def test_a_damaged_chat_template_is_refused_and_its_own_error_is_the_questions(folder):
    template = folder / "chat_template.jinja"
    for content, words in ((b"{% for %}", "is not valid"), (b"\xff", "codec can't decode")):
        template.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            prompt_builder(ModelSource.resolve(folder))
    for content, words in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['role'] }}: hello", "does not write 2 videos"),
    ):
        template.write_text(content)
        with pytest.raises(ValueError, match=words):
            prompt_builder(ModelSource.resolve(folder)).build("Why?", [video("tiny"), video("tiny")])


@pytest.mark.parametrize("end", ["<think>\n", "<think>"])
def test_a_tag_that_the_template_opens_is_known_and_closed_where_that_is_asked_for(folder, end):
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(f"{{% if add_generation_prompt %}}{{{{ {end!r} }}}}{{% endif %}}")
    source, visual = ModelSource.resolve(folder), video("tiny")
    open_, closed = (prompt_builder(source, thought=thought) for thought in ("open", "closed"))
    assert open_.open_tag == closed.open_tag == "<think>"
    question = "Why? <think>"  # what a user writes is left alone
    texts = [text_of("tiny", one.build(question, [visual])) for one in (open_, closed)]
    assert texts[0].endswith(end) and texts[1] == f"{texts[0].rstrip()}\n\n</think>\n\n"
    assert closed.policy.describe() == {**open_.policy.describe(), "thought": "closed"}
    assert "thought" not in open_.policy.describe()  # answers from before there was a choice are asked for so again
    assert pickle.loads(pickle.dumps(closed)).open_tag == "<think>"  # noqa: S301 - our own bytes


def test_closing_a_thought_changes_nothing_where_the_template_opens_none(name):
    plain, closed = (prompt_builder(ModelSource.resolve(name), thought=thought) for thought in ("open", "closed"))
    assert plain.open_tag == closed.open_tag == "" and closed.policy == plain.policy
    ids = [one.build("Why? <think>", [video(name)]).input_ids for one in (plain, closed)]
    assert torch.equal(*ids)


def test_a_tokenizer_is_loaded_once_and_a_damaged_one_is_refused_and_so_is_none(folder):
    first, second = (prompt_builder(ModelSource.resolve(folder)) for _ in range(2))
    assert first.tokenizer is second.tokenizer
    for content in ("{", "{}", '{"added_tokens": [], "model": {}}'):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=r"no tokenizer that can be loaded.*download it again"):
            prompt_builder(ModelSource.resolve(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        prompt_builder(ModelSource.resolve(folder))


@pytest.mark.parametrize("name", KINDS)
def test_default_dtype_and_device_change_no_prompt(name):
    visual = video(name, index=[3, 30, 77])
    for positions in ("original", "contiguous"):
        expected = builder(name, positions).build("And then?", [visual])
        with defaults(torch.bfloat16, "meta"):
            prompt = builder(name, positions).build("And then?", [visual])
        assert torch.equal(prompt.input_ids, expected.input_ids)
        assert torch.equal(prompt.positions, expected.positions)


@pytest.mark.parametrize("name", ["tiny-qwen3-vl", "tiny-qwen3-5"], scope="module")
def test_a_drawn_answer_depends_on_its_own_seed_alone(name, prompts):
    def decodings(*seeds):
        return [Decoding(max_new_tokens=8, temperature=0.9, top_p=0.95, top_k=50, seed=seed) for seed in seeds]

    together = llm(name).generate([*prompts, prompts[0], prompts[0]], [*decodings(0, 1, 2, 3, 4), GREEDY])
    alone = [llm(name).generate([p], [d])[0] for p, d in zip(prompts, decodings(0, 1, 2, 3), strict=True)]
    assert ids_of(together[:4]) == ids_of(alone)
    assert together[4].token_ids != together[0].token_ids
    assert together[5].token_ids == llm(name).generate([prompts[0]], [GREEDY])[0].token_ids


def drawn(scores, seeds=range(300), **options):
    """What some seeds draw of one row of scores."""
    rows = torch.tensor([scores])
    return {
        int(SeededSampling([Decoding(seed=seed, **options)])(torch.zeros(1, 1, dtype=torch.long), rows).argmax())
        for seed in seeds
    }


def test_the_temperature_divides_the_logits_from_greedy_to_any_heat():
    for temperature, share in ((0.5, 0.881), (1.0, 0.731), (4.0, 0.562)):
        draws = [drawn([0.0, 1.0], range(i, i + 1), temperature=temperature) for i in range(500)]
        assert draws.count({1}) / 500 == pytest.approx(share, abs=0.05)
    for temperature in (1e-300, 1e-38, 1e-7):
        for options in ({}, {"top_p": 0.5, "top_k": 2}):
            assert drawn([30.0, -5.0, 31.0, 29.0], range(20), temperature=temperature, **options) == {2}
    for temperature in (1e30, 1e300):  # what the model rules out stays so
        assert drawn([30.0, float("-inf"), -31.0], temperature=temperature) == {0, 2}


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.6, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_only_the_likeliest_that_make_up_top_p_are_drawn(top_p, kept):
    logits = torch.tensor([0.2, 0.4, 0.3, 0.1]).log().tolist()
    assert drawn(logits, temperature=1.0, top_p=top_p) == kept
    assert drawn(logits, temperature=1.0, top_k=len(kept)) == kept
