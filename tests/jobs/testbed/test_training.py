"""What the trainer teaches: cells, questions as ids, the decoder against the real class, stages that go on."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from jobs.testbed.training.checkpoint import write_checkpoint
from jobs.testbed.training.corpus import ideal_source
from jobs.testbed.training.decoder import Decoder
from jobs.testbed.training.frames import Difficulty, busy_frames
from jobs.testbed.training.language import Portion, any_portion, chosen, first_portion
from jobs.testbed.training.lessons import SILENT, Asked, echo, lesson_of
from jobs.testbed.training.network import Eyes, assembled
from jobs.testbed.training.space import (
    CELLS,
    GRID,
    ID,
    LETTERS,
    NAMES,
    NORM,
    TOKENS,
    UNKNOWN,
    cells_of,
    ideal_tokens,
    readers,
    word_vectors,
)
from jobs.testbed.training.stage import Schedule, Stage
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.questions import TYPES, ask
from pipeline.evaluate.shapes.render import render
from pipeline.evaluate.shapes.words import COLORS, CORNERS
from pipeline.evaluate.shapes.world import FRAMES, corner_of
from pipeline.generate.choices import lettered_prompt

SEED = 1_000_000


def videos(count=6):
    return [make_video(SEED + i, split="train", n_frames=FRAMES[i % 3]) for i in range(count)]


@pytest.fixture(scope="module")
def halves():
    torch.manual_seed(3)
    return Eyes().eval(), Decoder().eval()


def test_words_are_orthogonal_and_all_alike_loud():
    words = word_vectors()
    torch.testing.assert_close(words @ words.T, NORM**2 * torch.eye(len(TOKENS)), atol=1e-5, rtol=0)
    assert len(set(TOKENS)) == len(TOKENS)


def test_a_cell_shows_the_thing_that_covers_it():
    for video in videos():
        cells, image = cells_of(video), render(video)
        assert image.shape[0] == len(cells.scene)
        for index, thing in enumerate(video.things):
            for shot in thing.shots:
                at = cells.thing[shot.frame] == index
                assert 1 <= at.sum() <= 6, (video.seed, thing)
                assert {NAMES[i - 1] for i in cells.name[shot.frame][at]} == {thing.name}
                if thing.kind != "sign":
                    assert COLORS[cells.color[shot.frame][at][0] - 1] in {s.color for s in thing.shots}
                rows, columns = np.divmod(np.flatnonzero(at), GRID)
                near = np.maximum(
                    abs(rows * 16 + 8 - shot.y - thing.size / 2), abs(columns * 16 + 8 - shot.x - thing.size / 2)
                )
                assert near.min() <= 8  # the cell that its middle is in
                assert thing.kind == "copies" or near.max() < 8 + thing.size / 2
        assert ((cells.since == 0) <= (cells.thing >= 0)).all() and (
            cells.shown.reshape(-1, CELLS) == (cells.name > 0)
        ).all()


def test_an_ideal_token_says_what_its_cell_shows_and_nothing_else():
    cells = cells_of(videos()[2])
    tokens = ideal_tokens(cells)
    for reader, index, offset in zip(readers(), cells, (0, 0, 1, 1), strict=False):
        said = tokens @ reader.T
        wanted = torch.zeros_like(said)
        frame, cell = np.nonzero(index >= offset)
        wanted[frame, cell, index[frame, cell] - offset] = 1
        torch.testing.assert_close(said, wanted, atol=1e-5, rtol=0)


def test_lessons_have_the_ids_of_the_real_prompt(halves, tmp_path):
    write_checkpoint(tmp_path, halves[0], halves[1].state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    seen = set()
    for video in videos(12):
        for question in ask(video):
            text = lettered_prompt(question.prompt, question.choices)
            message = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
            prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
            lesson = lesson_of(question)
            assert ids[:2] == [ID["<|im_start|>"], ID["<video>"]] and ids[2:] == lesson.ids[:-1]
            assert lesson.ids[-1] == ID[LETTERS[question.answer]] and ID[UNKNOWN] not in lesson.ids
            assert [TOKENS[lesson.ids[i]] for i in lesson.options] == list(question.choices)
            if question.type not in {"order", "onset"}:
                assert TOKENS[lesson.ids[lesson.subject]] == question.subject
                assert TOKENS[lesson.plain] == question.right
                assert lesson.early == grounds(question)
                assert lesson.where == (
                    [] if question.type == "sign" else [corner in corners(question) for corner in CORNERS]
                )
            seen.add(question.type)
    assert seen == set(TYPES)


def grounds(question):
    """What the answer follows from: a frame, or nothing yet, or itself."""
    frames = [box.frame for part in question.evidence.parts for box in part.boxes]
    if question.type in {"quarter", "change"}:
        return ID[f"<frame {frames[-1] if 'later' in question.prompt else frames[0]}>"]
    return SILENT if question.type == "count" else ID[question.right]


def corners(question):
    return {CORNERS[corner_of(box)] for part in question.evidence.parts for box in part.boxes}


def test_what_is_heard_on_the_way_is_what_the_kept_tokens_show():
    video = next(video for video in videos(40) if (thing := video.extra("changing")) and len(thing.shots) > 3)
    shots, heard = video.extra("changing").shots, {}
    for draw in range(8):
        question = next(one for one in ask(video, draw=draw) if one.type == "change")
        side = [shot for shot in shots if shot.color == question.right]
        shot = side[-1] if len(side) == 1 else side[len(side) // 2]  # neither the first nor the last, where it can be
        kept = np.zeros((video.n_frames, GRID, GRID), bool)
        box = video.extra("changing").box(shot)
        kept[shot.frame, (box.y0 + box.y1) // 32, (box.x0 + box.x1) // 32] = True
        lesson = lesson_of(question, kept)
        assert TOKENS[lesson.early] == f"<frame {shot.frame}>"
        assert [CORNERS[i] for i in range(4) if lesson.where[i]] == [CORNERS[corner_of(box)]]
        heard[question.prompt] = lesson.early
    assert len(heard) == 2


def test_a_question_is_no_lesson_where_its_answer_is_not_shown():
    video = videos()[0]
    nothing = np.zeros((video.n_frames, GRID, GRID), bool)
    for question in ask(video):
        assert lesson_of(question, nothing) is None and lesson_of(question, ~nothing) is not None


def test_an_echo_says_its_own_answer():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lesson = echo(rng)
        assert lesson.ids[lesson.subject] == lesson.plain == lesson.ids[lesson.options[lesson.answer]]


@pytest.mark.parametrize("stays", [True, False])
def test_the_decoder_is_the_real_language_model(halves, stays):
    """Each question's logits, with all of a video or a part of it, at original or closed-up positions."""
    eyes, decoder = halves
    video = videos()[0]
    total = video.n_frames * CELLS
    index = np.arange(0, total, 3)
    places = torch.from_numpy(index) if stays else torch.arange(len(index))
    end = total if stays else len(index)
    asked = Asked([[lesson_of(question) for question in ask(video)[:3]]])
    model = assembled(eyes, decoder.state_dict())
    with torch.no_grad():
        visual = eyes(render(video)).flatten(0, 1)[torch.from_numpy(index)]
        states = decoder(visual[None], places[None], torch.tensor([end]), asked.ids)
        mine = decoder.lm_head(states.last)[0]
        embed = model.get_input_embeddings()
        for k, ids in enumerate(asked.ids[0]):
            start = embed(torch.tensor([ID["<|im_start|>"]]))
            x = torch.cat([start, visual, model.model.image_newline[None], embed(ids)])[None]
            position = torch.cat([torch.tensor([0]), places + 1, end + 1 + torch.arange(1 + len(ids))])[None]
            # With a mask: without one, transformers takes a gap in the positions for the start of another sequence.
            mask = torch.ones(x.shape[:2], dtype=torch.long)
            theirs = model(inputs_embeds=x, attention_mask=mask, position_ids=position).logits[0, -len(ids) :]
            torch.testing.assert_close(mine[k], theirs, atol=2e-4, rtol=1e-4)


def test_portions_begin_small_and_end_with_everything():
    rng = np.random.default_rng(1)
    assert {first_portion(0, rng) for _ in range(5)} == {Portion(8, 16, "things")}
    later = [any_portion(2000, rng) for _ in range(300)]
    assert {one.n_frames for one in later} == set(FRAMES)
    shares = np.array([one.n_kept / (one.n_frames * CELLS) for one in later])
    assert 0.3 < (shares == 1).mean() < 0.6 and shares.min() < 0.05 and shares.max() == 1


def test_things_come_before_ground_and_new_ones_before_old():
    rng = np.random.default_rng(2)
    for video in videos():
        cells = cells_of(video)
        index = chosen(rng, cells, Portion(video.n_frames, video.n_frames * 3, "things"))
        assert (np.diff(index) > 0).all() and (np.bincount(index // CELLS) == 3).all()
        for t in range(video.n_frames):
            here = cells.thing[t][index[index // CELLS == t] % CELLS]
            new = {i for i, thing in enumerate(video.things) if cells.since[t][cells.thing[t] == i].tolist()[:1] == [0]}
            assert len(set(here) & new) == min(3, len(new))


def test_busy_frames_are_as_hard_as_asked_and_follow_from_their_seed():
    easy, cells = busy_frames(np.random.default_rng(4), 16, Difficulty(free=0.0, hard=0.0))
    again, _ = busy_frames(np.random.default_rng(4), 16, Difficulty(free=0.0, hard=0.0))
    assert easy.shape == (16, 96, 96, 3) and (easy == again).all()
    assert 0.05 < (cells.name > 0).mean() < 0.6


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def _train(folder, steps, stop=None):
    """A stage of a line that is fitted to noise; ``stop``: the step at which the machine goes away."""
    module = Line()

    def step(number, rng, meter):
        if number == stop:
            raise KeyboardInterrupt
        target = torch.from_numpy(rng.normal(size=3)).float() + torch.randn(3)
        meter.add("error", 1.0)
        return (module.weight - target).square().sum()

    stage = Stage(folder=folder, name="line", seed=5, schedule=Schedule(steps=steps, rate=0.1), say=lambda line: None)
    if stop is None:
        stage.run(module, step)
    else:
        with pytest.raises(KeyboardInterrupt):
            stage.run(module, step)
    return module, stage


def test_a_stage_that_was_stopped_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.testbed.training.stage._SAVE_EVERY_S", 0.0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, one = _train(tmp_path / "a", 100)
    _train(tmp_path / "b", 100, stop=60)
    assert torch.load(tmp_path / "b" / "line.pt", weights_only=True)["step"] == 50
    resumed, other = _train(tmp_path / "b", 100)
    assert torch.equal(whole.weight, resumed.weight) and whole.weight.abs().sum() > 0
    steps = [[json.loads(line)["step"] for line in stage.log.read_text().splitlines()] for stage in (one, other)]
    assert steps == [[25, 50, 75, 100]] * 2
    again, _ = _train(tmp_path / "b", 100)  # nothing is left to do
    assert torch.equal(again.weight, whole.weight)


def test_the_rate_rises_holds_and_falls():
    schedule = Schedule(steps=1000, rate=1.0, warmup=10, decay=0.3)
    rates = [schedule.rate_at(step) for step in (0, 9, 500, 850, 999)]
    assert rates[0] == 0.1 and rates[1:3] == [1.0, 1.0] and 0.4 < rates[3] < 0.6 and rates[4] == 0.05


def test_ideal_videos_follow_from_the_generator():
    one, other = (ideal_source(np.random.default_rng(8), 16) for _ in range(2))
    assert one.video == other.video and torch.equal(one.tokens, other.tokens)
    assert one.tokens.shape == (16, CELLS, 128)
