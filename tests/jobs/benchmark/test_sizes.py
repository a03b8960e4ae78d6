"""Sizes of made-up videos that make no sense."""

import pytest

from jobs.benchmark import __main__ as benchmark


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["methods", "--frames", "0"], "at least 1"),
        (["methods", "--retention-ratio", "2"], "in (0, 1]"),
        (["methods", "--json", "no-such-folder/times.json"], "no folder"),
        (["read", "--folder", "no-such-folder"], "there is no folder no-such-folder"),
    ],
)
def test_senseless_sizes_are_refused(capsys, wrong, named):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(wrong)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
