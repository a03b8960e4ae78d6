"""A server in a process of its own."""

from urllib.error import URLError
from urllib.request import urlopen

import pytest

from jobs.benchmark.server import served
from pipeline.errors import RunFailed


def test_a_server_answers_in_the_context_and_ends_with_it():
    with served("http.server", "--bind", "127.0.0.1", ready="/", patience_s=60) as address:
        assert urlopen(address).status == 200
    with pytest.raises(URLError):
        urlopen(address)


@pytest.mark.parametrize(("module", "patience_s"), [("this", 60), ("http.server", 1)])
def test_one_that_ends_or_answers_nothing_in_time_is_said_with_what_it_printed(module, patience_s):
    with (
        pytest.raises(RunFailed, match=rf"(?s){module} did not become ready: .*(explicit|File not found)"),
        served(module, ready="/no-such-file", patience_s=patience_s),
    ):
        pass
