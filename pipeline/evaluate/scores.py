"""A benchmark's questions in the form that jobs.generate asks, and the scores of its answers, ``scores.parquet``.

It also writes files for the server of a benchmark whose right answers are not published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.schema import make_field, write_parquet
from pipeline.console import Say
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks.base import BenchmarkScores
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.benchmarks.own import is_same_text, is_unpublished, make_answered_item
from pipeline.evaluate.parsers import ParsedReply, parse_choice
from pipeline.evaluate.protocols import Protocol
from pipeline.evaluate.statistics import MethodAtRatio, list_arms, list_row_arms, set_arm_scores
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, derive_seed, strip_reasoning
from pipeline.rows import AnswerRecord, JsonObject, QuestionRecord, drop_nulls
from pipeline.storage.stores import Store

SCORES = "scores.parquet"
SUBMISSIONS = "submissions"  # folder of results
FORM = f"{SUBMISSIONS}/server.json"
DRAWN, IN_WORD = "drawn", "in-word"  # ways of reading a reply that rest on chance

SCORE_SCHEMA = pa.schema(
    [
        make_field("question_id", pa.string(), "the id in the benchmark", nullable=False),
        make_field("video_id", pa.string(), "the video, or the first of several", nullable=False),
        make_field("cluster", pa.string(), "what is drawn together when errors are estimated", nullable=False),
        make_field(
            "splits", pa.map_(pa.string(), pa.string()), "split of the benchmark -> the part of it", nullable=False
        ),
        make_field("method", pa.string(), "pruning method with its parameters; none: full retention", nullable=False),
        make_field("retention_ratio", pa.float64(), "nominal share of the visual tokens", nullable=False),
        make_field("status", pa.string(), "'ok' or 'failed'", nullable=False),
        make_field("error_class", pa.string(), "why there is no reply"),
        make_field(
            "reply", pa.string(), "what the model said; the letter or text of the likeliest option where scored"
        ),
        make_field("parsed", pa.int32(), "index of the option that the reply names; null where it names none"),
        make_field("answer", pa.int32(), "index of the right option; null where none is, or there are no options"),
        make_field("n_options", pa.int32(), "options of the question", nullable=False),
        make_field(
            "right", pa.bool_(), "whether the reply is right; of a rule that draws: false; null: nobody published it"
        ),
        make_field("score", pa.float64(), "1 or 0; where the rule draws at random its expectation; null likewise"),
        make_field(
            "finish",
            pa.string(),
            "'stop': the model ended the reply; 'length': max_new_tokens cut it; null where scored, and in older files",
        ),
        make_field(
            "weak",
            pa.string(),
            "the weak rule that read the reply: 'drawn' at random, or a letter 'in-word' (\"Both\" is B); else null",
        ),
        make_field("choice_scores", pa.list_(pa.float64()), "natural log-probability of each option, where scored"),
        make_field("n_kept", pa.int32(), "visual tokens that were kept"),
        make_field("n_total", pa.int32(), "visual tokens before pruning"),
        make_field(
            "kept_per_frame", pa.list_(pa.int32()), "kept tokens of each frame; null where the model prunes inside"
        ),
        make_field(
            "decode_warnings", pa.int32(), "warnings while its videos were decoded: their frames may be damaged"
        ),
    ]
)

#: Nullable columns that older files of the same schema version lack, with the date since when files have them.
LATER_COLUMNS: Mapping[str, str] = dict.fromkeys(("finish", "weak", "decode_warnings"), "2026-11-26")
# Columns that are copied from an answer to its score.
_SAME = ("finish", "choice_scores", "n_kept", "n_total", "kept_per_frame", "decode_warnings")
_NEEDED_COLUMNS = ["question_id", "status", "error_class", "answer", "choice", *_SAME]


class Reply(NamedTuple):
    """A reply as read by the protocol's rule; ``right`` and ``score`` are None if the right answer is not published.

    Attributes:
        parsed: the index of the named option; None if it names none, or there are no options.
        score: 0 to 1.
        weak: DRAWN or IN_WORD if a weak rule read the reply; otherwise None.
    """

    parsed: int | None
    right: bool | None
    score: float | None
    weak: str | None = None


class AnsweredItems(NamedTuple):
    """The questions that can be scored, and their answers.

    Attributes:
        items: the questions, without those that were removed under any arm.
        rows: for each arm, its answers by question id, including those of removed questions; missing answers have no
            entry.
    """

    items: Sequence[Item]
    rows: Mapping[MethodAtRatio, Mapping[str, AnswerRecord]]

    @classmethod
    def select(cls, items: Sequence[Item], arms: Mapping[str, MethodAtRatio], answers: pa.Table) -> AnsweredItems:
        """Select the answers of some arms.

        Args:
            arms: the arms by label, the value of ``pruning`` in their answers; answers with other labels are ignored.
            answers: live rows of ANSWER_SCHEMA.
        """
        removed_ids = set(answers.filter(pc.equal(answers["status"], "removed"))["question_id"].to_pylist())
        rows = {}
        for label, arm in arms.items():
            arm_answers = answers.filter(pc.equal(answers["pruning"], label)).select(_NEEDED_COLUMNS)
            rows[arm] = {row["question_id"]: drop_nulls(row, AnswerRecord) for row in arm_answers.to_pylist()}
        return cls([item for item in items if item.question_id not in removed_ids], rows)

    def replies(self, protocol: Protocol) -> dict[str, dict[str, str]]:
        """Return the replies by arm label and question id, without reasoning; questions that failed are left out."""
        return {
            arm.label: {
                question_id: strip_reasoning(row["answer"], protocol.reasoning)
                for question_id, row in arm_rows.items()
                if row["status"] == "ok"
            }
            for arm, arm_rows in self.rows.items()
        }


def make_score_table(answered: AnsweredItems, protocol: Protocol, own: BenchmarkScores | None = None) -> pa.Table:
    """Return the scores as rows of SCORE_SCHEMA: arm by arm, one row for each question.

    A missing answer counts as failed. A failed answer scores 0, or null if the right answer is not published.

    Args:
        own: scores that the benchmark's own code computed, which replace those of the rule. Questions that they leave
            out get no row. If it has only numbers of whole arms, every score is null.
    """
    tables = [SCORE_SCHEMA.empty_table()]
    for arm, rows in answered.rows.items():
        arm_scores = None if own is None or own.scores is None else own.scores[arm.label]
        score_rows = []
        for item in answered.items:
            if arm_scores is not None and item.question_id not in arm_scores:
                continue
            row = _make_score_row(item, arm, rows.get(item.question_id), protocol)
            if own is not None:
                score = None if arm_scores is None else arm_scores[item.question_id] if row["status"] == "ok" else 0.0
                row = {**row, "score": score, "right": None if score is None else score == 1.0}
            score_rows.append(row)
        tables.append(pa.Table.from_pylist(score_rows, schema=SCORE_SCHEMA))
    return pa.concat_tables(tables)


def read_reply(item: Item, row: AnswerRecord, protocol: Protocol) -> Reply:
    """Score an answer that did not fail.

    A choice that the model scored is taken as it is, a generated reply is read by the protocol's rule without its
    reasoning, and a reply to a question without options is compared with the expected text.
    """
    reply = strip_reasoning(row["answer"], protocol.reasoning)
    if not item.options:
        right = is_same_text(reply, item.expected or "")
        return Reply(None, right, float(right))
    result = (
        ParsedReply(row["choice"]) if "choice_scores" in row else parse_choice(protocol.parser, reply, item.options)
    )
    weak = DRAWN if result.drawn else IN_WORD if result.in_word else None
    if item.expected is None:
        return Reply(result.choice, None, None, weak)
    score = result.score(item.answer, len(item.options))
    return Reply(result.choice, not result.drawn and score == 1.0, score, weak)


def _make_score_row(item: Item, arm: MethodAtRatio, row: AnswerRecord | None, protocol: Protocol) -> JsonObject:
    """Return the row of one question under one arm; it fails as "unanswered" if ``row`` is None.

    The score of a failed row is 0, or None if the right answer is not published.
    """
    common = {
        "question_id": item.question_id,
        "video_id": item.video_id,
        "cluster": item.cluster,
        "splits": list(item.splits.items()),
        "method": arm.method,
        "retention_ratio": arm.ratio,
        "answer": item.answer,
        "n_options": len(item.options),
    }
    if row is None or row["status"] != "ok":
        error_class = "unanswered" if row is None else row["error_class"]
        unscored = (None, None) if item.expected is None else (False, 0.0)
        return {**common, "status": "failed", "error_class": error_class, **Reply(None, *unscored)._asdict()}
    reply = read_reply(item, row, protocol)
    copied = {name: row.get(name) for name in _SAME}
    return {**common, "status": "ok", "reply": row["answer"], **reply._asdict(), **copied}


def make_answer_mode(protocol: Protocol, model_type: str) -> AnswerMode:
    """Return how the protocol asks this model type: method for choices, system message and decoding."""
    return AnswerMode(protocol.decoding, protocol.choices, protocol.get_rules(model_type).system)


def make_question_table(items: Sequence[Item], protocol: Protocol, model_type: str) -> pa.Table:
    """Return the items as a table of QUESTION_SCHEMA, one row per item in order."""
    mode = make_answer_mode(protocol, model_type)
    rows = [_make_question_row(item, protocol, model_type, mode) for item in items]
    return pa.Table.from_pylist(rows, schema=QUESTION_SCHEMA)


def _make_question_row(item: Item, protocol: Protocol, model_type: str, mode: AnswerMode) -> QuestionRecord:
    """Return an item as a row of QUESTION_SCHEMA; its seed of decoding is derived from its id.

    If the options are scored, they are in ``choices``, and the prompt is the bare question. Otherwise the prompt is the
    protocol's whole message with the options in it.
    """
    is_scored = bool(item.options) and protocol.choices != "generate"
    # Seeds matter only for sampled replies. A question's seed does not depend on the other questions.
    decoding = replace(mode.decoding, seed=derive_seed(mode.decoding.seed, item.question_id))
    mode = replace(mode, decoding=decoding)
    question: QuestionRecord = {
        "question_id": item.question_id,
        "video_ids": list(item.video_ids),
        "prompt": item.question if is_scored else protocol.text(item, model_type),
        "decoding": (mode if is_scored else replace(mode, method="generate")).describe(),
    }
    if item.conversation is not None:
        question["conversation"] = item.conversation
    if is_scored:
        question["choices"] = list(item.options)
    if item.expected is not None:
        question["target"] = item.expected
    return question


def read_answered_item(row: AnswerRecord) -> Item | None:
    """Return the question of an answer of jobs.generate, or None if no right answer is stored or published."""
    if "target" not in row:
        return None
    item = make_answered_item(row, f"question {row['question_id']}")
    return None if is_unpublished(item) else item


class Submission(NamedTuple):
    """The options that one method chose at one ratio.

    Attributes:
        choices: the index of the chosen option, from 0, by question id. Failed questions are left out; the server
            counts them as wrong.
        n_drawn: the number of replies that name no option, for which one was drawn.
    """

    choices: dict[str, int]
    n_drawn: int


def make_submissions(items: Sequence[Item], scores: pa.Table) -> dict[MethodAtRatio, Submission]:
    """Return the submission of every arm in ``scores``; failed questions are left out.

    If a reply names no option, one is drawn, as in lmms-eval, by the question's id alone: it is the same for all
    methods and in every run.
    """
    items_by_id = {item.question_id: item for item in items}
    submission_of = {arm: Submission({}, 0) for arm in list_arms(scores)}
    rows = scores.select(["question_id", "status", "parsed"]).to_pylist()
    for arm, row in zip(list_row_arms(scores), rows, strict=True):
        if row["status"] == "ok":
            name = row["question_id"]
            choice = row["parsed"]
            if choice is None:
                hashed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
                choice = hashed % len(items_by_id[name].options)
                submission_of[arm] = submission_of[arm]._replace(n_drawn=submission_of[arm].n_drawn + 1)
            submission_of[arm].choices[name] = choice
    return submission_of


def write_submissions(store: Store, items: Sequence[Item], scores: pa.Table, say: Say) -> list[str]:
    """Write the unscored answers, one submission per method and ratio, and the form; return the names of these files.

    The user types the server's scores into the form; numbers that it has already are kept. Prints how many options were
    drawn and how many questions failed.

    Raises:
        UsageError: the existing form is malformed; the other files were written.
    """
    store.put(SCORES, write_parquet(scores))
    names = [SCORES]
    for arm, submission in make_submissions(items, scores).items():
        names.append(f"{SUBMISSIONS}/{make_submission_name(arm)}.json")
        store.put(names[-1], json.dumps(submission.choices, indent=1).encode())
        if n_drawn := submission.n_drawn:
            say(f"note: {names[-1]}: {n_drawn} replies name no option; one is drawn for each, by the question's id")
        if missing := len(items) - len(submission.choices):
            say(f"note: {names[-1]}: {missing} questions failed, and are left out")
    form = {**dict.fromkeys(map(make_submission_name, list_arms(scores))), **read_server_scores(store)}
    store.put(FORM, json.dumps(form, indent=1).encode())
    return [*names, FORM]


def make_submission_name(arm: MethodAtRatio) -> str:
    """Return the name of an arm's submission without .json; runs of characters other than A-Za-z0-9=.,+- become "-"."""
    return f"{re.sub(r'[^A-Za-z0-9=.,+-]+', '-', arm.method)}@{arm.ratio:g}"


def apply_server_scores(store: Store, scores: pa.Table) -> pa.Table:
    """Return the scores with the percentages from the form; arms without a percentage have null scores.

    All rows count as questions about one video, so that no interval is computed.
    """
    typed = read_server_scores(store)
    percentages = {arm: typed.get(make_submission_name(arm)) for arm in list_arms(scores)}
    return set_arm_scores(scores, {arm: None if value is None else value / 100 for arm, value in percentages.items()})


def list_unknown_names(store: Store, arms: Iterable[MethodAtRatio]) -> list[str]:
    """Return the names with a number in the form that belong to none of these arms."""
    known_names = set(map(make_submission_name, arms))
    return [name for name, value in read_server_scores(store).items() if value is not None and name not in known_names]


def read_server_scores(store: Store) -> dict[str, float | None]:
    """Read the form: the server's percentage for each submission, None where none is typed; {} if there is no form.

    Raises:
        UsageError: the form is not a JSON object, a value is not a number from 0 to 100, or all numbers are at most 1,
            which suggests shares.
    """
    if not store.exists(FORM):
        return {}
    try:
        form = json.loads(store.read(FORM))
    except ValueError as error:
        raise UsageError(f"{store}: {FORM} is not valid JSON: {error}") from error
    if not isinstance(form, dict):
        raise UsageError(f'{store}: {FORM} must be an object such as {{"gstep@0.25": 59.2}}')
    typed = {name: value for name, value in form.items() if value is not None}
    for name, value in typed.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise UsageError(f"{store}: {FORM}: {name} must be a percentage of right answers, got {value!r}")
    if typed and max(typed.values()) <= 1:
        raise UsageError(f"{store}: {FORM}: numbers must be percentages, 59.2 and not 0.592")
    return form
