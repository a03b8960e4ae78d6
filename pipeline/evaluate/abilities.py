"""The kinds of ability that questions test: a table of rules over benchmarks and their splits that users can extend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.inputs.tables import UNREADABLE, BadRow, UserRow, read_rows

GENERAL = "general"  # the ability of a question that no rule matches
#: The built-in abilities in the order in which they are shown.
ABILITIES = ("grounding", "counting", "order", "hallucination", "OCR", "needle", GENERAL)
_COLUMNS = ("benchmark", "split", "value", "ability")
_NEEDS = "the columns benchmark,split,value,ability"
_EXAMPLE = "such as videomme,task_type,Counting Problem,counting"


@dataclass(frozen=True)
class AbilityRule:
    """A row of the table: the questions that it matches, and the ability that they test.

    Attributes:
        benchmark: a benchmark's name, or an fnmatch pattern of names, such as ``lmms:timelens_*``.
        split: the name of a split of the benchmark; "" to match all questions.
        value: the value of the split that questions must have; "" if ``split`` is "".
        source: the file and row of a user's rule; "" for a built-in rule.
    """

    benchmark: str
    split: str
    value: str
    ability: str
    source: str = ""

    def matches_benchmark(self, name: str) -> bool:
        """Return True if ``name`` matches the rule's benchmark pattern; case counts."""
        return fnmatchcase(name, self.benchmark)

    def matches_splits(self, splits: Mapping[str, str]) -> bool:
        """Return True if the rule's split has its value in a question's ``splits``, or if the rule names no split."""
        return not self.split or splits.get(self.split) == self.value


def _make_ability_rules(benchmark: str, split: str, values: Sequence[str], ability: str) -> list[AbilityRule]:
    """Return one rule with the given ability for each value of a split."""
    return [AbilityRule(benchmark, split, value, ability) for value in values]


#: The built-in table; the first rule that matches a question counts.
BUILT_IN: Sequence[AbilityRule] = (
    *_make_ability_rules("shapes", "domain", ["needle"], "needle"),
    *_make_ability_rules("shapes", "task_type", ["count"], "counting"),
    *_make_ability_rules("shapes", "task_type", ["order", "onset", "quarter"], "order"),
    *_make_ability_rules("shapes", "task_type", ["sign"], "OCR"),
    *_make_ability_rules("videomme", "task_type", ["Counting Problem"], "counting"),
    *_make_ability_rules("videomme", "task_type", ["OCR Problems"], "OCR"),
    *_make_ability_rules("videomme", "task_type", ["Temporal Perception", "Temporal Reasoning"], "order"),
    *_make_ability_rules("mlvu-*", "task_type", ["count"], "counting"),
    *_make_ability_rules("mlvu-*", "task_type", ["order"], "order"),
    *_make_ability_rules("mlvu-*", "task_type", ["needle", "needleQA"], "needle"),
    *_make_ability_rules("mvbench", "task", ["action_count", "moving_count"], "counting"),
    *_make_ability_rules("mvbench", "task", ["character_order", "action_sequence", "scene_transition"], "order"),
    *_make_ability_rules("mvbench", "task", ["action_localization"], "grounding"),
    *_make_ability_rules("longvideobench", "question_category", ["E3E", "O3O", "SSS", "T3E", "T3O"], "order"),
    AbilityRule("lmms:temporal_grounding_charades", "", "", "grounding"),
    AbilityRule("lmms:timelens_*", "", "", "grounding"),
    *_make_ability_rules("lmms:vsibench*", "question_type", ["object_counting"], "counting"),
    *_make_ability_rules("lmms:vsibench*", "question_type", ["obj_appearance_order"], "order"),
    *_make_ability_rules("lmms:tempcompass_*", "dim", ["order"], "order"),
    AbilityRule("lmms:vinoground", "", "", "order"),
    AbilityRule("lmms:countix", "", "", "counting"),
    AbilityRule("lmms:repcount", "", "", "counting"),
    AbilityRule("lmms:pushupbench", "", "", "counting"),
    AbilityRule("lmms:cgav_counting*", "", "", "counting"),
)


def read_ability_rules(path: str) -> list[AbilityRule]:
    """Read a user's .csv with the columns benchmark, split, value and ability, and return its rules in file order.

    Raises:
        UsageError: the file's name does not end with .csv, the file cannot be read or has no rows, or a row is
            malformed.
    """
    if not path.casefold().endswith(".csv"):
        raise UsageError(f"--abilities {path}: name a .csv with {_NEEDS}")
    try:
        with Path(path).open("rb") as file:
            rules = [_read_rule(f"{path}, {place}", row) for place, row in read_rows(path, file, _NEEDS, "ability")]
    except BadRow as error:
        raise UsageError(f"--abilities {error}; write {_NEEDS}, {_EXAMPLE}") from error
    except UNREADABLE as error:
        raise UsageError(f"--abilities {path}: cannot be read: {error}; name a .csv with {_NEEDS}") from error
    if not rules:
        raise UsageError(f"--abilities {path}: it has no row below the names of its columns; write rows {_EXAMPLE}")
    return rules


def _read_rule(where: str, row: UserRow) -> AbilityRule:
    """Convert a row of a user's file to a rule; missing cells count as empty, and surrounding spaces are removed.

    An ability that equals a built-in one in any case gets the built-in spelling.

    Raises:
        BadRow: a column is unknown, benchmark or ability is empty, or only one of split and value is given.
    """
    if unknown := [name for name in row if name not in _COLUMNS]:
        raise BadRow(f"{where}: there is no column {unknown[0]!r}")
    benchmark, split, value, ability = (str(row.get(name) or "").strip() for name in _COLUMNS)
    if not benchmark or not ability:
        raise BadRow(f"{where}: {'ability' if benchmark else 'benchmark'} is empty")
    if bool(split) != bool(value):
        raise BadRow(f"{where}: split and value go together (both empty: the whole benchmark)")
    built_in = {name.casefold(): name for name in ABILITIES}
    return AbilityRule(benchmark, split, value, built_in.get(ability.casefold(), ability), where)


def classify_questions(rules: Sequence[AbilityRule], name: str, splits: Sequence[Mapping[str, str]]) -> list[str]:
    """Return each question's ability: that of the first rule that matches the benchmark and its splits, or GENERAL."""
    rules = [rule for rule in rules if rule.matches_benchmark(name)]
    return [
        next((rule.ability for rule in rules if rule.matches_splits(question_splits)), GENERAL)
        for question_splits in splits
    ]


def order_abilities(present: Sequence[str]) -> list[str]:
    """Return the distinct abilities in display order: that of ABILITIES, with others inserted before GENERAL."""
    user_abilities = [ability for ability in dict.fromkeys(present) if ability not in ABILITIES]
    return [ability for ability in (*ABILITIES[:-1], *user_abilities, GENERAL) if ability in present]


def list_unused_rules(rules: Sequence[AbilityRule], splits: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """Return a line for each user's rule that matches no question, with its source and what is missing.

    Args:
        splits: for each benchmark by name, the split values of each of its questions.
    """
    lines = []
    for rule in rules:
        names = [name for name in splits if rule.matches_benchmark(name)]
        if not rule.source or any(
            rule.matches_splits(question_splits) for name in names for question_splits in splits[name]
        ):
            continue
        problem = f"no question of {', '.join(names)} has {rule.split}={rule.value}"
        if not names:
            problem = f"there are no results of a benchmark {rule.benchmark!r}; the benchmarks are {', '.join(splits)}"
        lines.append(f"{rule.source}: {problem}")
    return lines
