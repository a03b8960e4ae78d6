"""What videos take now: one look at each file, one HEAD for each object, and no guess where nobody answers."""

import pytest

from pipeline.errors import UsageError
from pipeline.prune.sizes import Sizes
from tests.pipeline.s3 import S3Server


@pytest.fixture
def server():
    with S3Server() as opened:
        yield opened


def test_an_outage_amid_many_questions_ends_them(server):
    uris = [server.uri(f"{number}.mp4") for number in range(300)]
    for number in range(40, 300):
        server.fail("HEAD", f"{number}.mp4", 403)
    with pytest.raises(UsageError, match=r"/71\.mp4: .*403"):
        Sizes(server.objects()).of(uris)
    assert len(server.requests) < 300
