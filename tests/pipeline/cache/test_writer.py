"""What the driver commits is what lies in its own cache."""

import pytest

from pipeline import TokenCache
from pipeline.cache.writer import commit, write_token_shard
from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import encoded, random_tokens, write_header


def test_tokens_on_a_disk_that_is_not_shared_are_not_committed(tmp_path):
    store = write_header(tmp_path / "drivers")
    video = encoded("v", random_tokens(0), 0.25, "gstep")
    written = write_token_shard([video], store=LocalStore(tmp_path / "nodes"), run_id="run")
    with pytest.raises(FileNotFoundError, match="must be shared by all"):
        commit(store, "run", 0, written)
    assert len(TokenCache(tmp_path / "drivers")) == 0
