"""What was found: counts by class for the terminal, and everything as JSON."""

import io

from rich.console import Console

from pipeline.verify.report import render
from tests.pipeline.damage import shards
from tests.pipeline.verifying import verified


def test_the_report_counts_by_class(store):
    for file in shards(store):
        file.unlink()
    output = io.StringIO()
    Console(file=output, width=200).print(render(verified(store)))
    said = " ".join(output.getvalue().replace("│", " ").split())
    assert f"missing 2 {store}" in said  # the class, how many, and one of them
    assert "the shard is missing" in said and "let --repair mark" in said and said.endswith("2 problems")
