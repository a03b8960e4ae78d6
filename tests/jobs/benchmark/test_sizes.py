"""Sizes of made-up videos that make no sense."""

import pytest

from jobs.benchmark import __main__ as benchmark


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--frames", "0"], "at least 1"),
        (["--retention-ratio", "2"], "in (0, 1]"),
        (["--json", "no-such-folder/times.json"], "no folder"),
    ],
)
def test_senseless_sizes_are_refused(capsys, wrong, named):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["methods", *wrong])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
