"""A video that was encoded again: what is the same, what is rounding, and what is neither."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.writer import KeptTokens
from pipeline.errors import UsageError, VideoFault
from pipeline.inputs.named_videos import Roots
from pipeline.prune.decode_stage import DecodeSetup, VideoDecoder
from pipeline.prune.encode_again import decode_again, read_run_config
from pipeline.storage.s3 import Objects
from pipeline.verify.live_check import LiveCheck, compare, explain_suspicion
from pipeline.video.sampling import Sampling
from tests.builders.caches import encoded, encoded_with, make_identity, random_tokens, write_header, write_shard
from tests.builders.clips import KeepSize

TOKENS = random_tokens(0)


@pytest.fixture
def stored(tmp_path):
    write_shard(write_header(tmp_path), "run", encoded("v", TOKENS, 0.25, "gstep"))
    return TokenCache(tmp_path).get("v", order="selection")


def again(tokens: torch.Tensor = TOKENS, ratio: float = 0.25, method: str = "gstep") -> KeptTokens:
    kept = encoded("v", tokens, ratio, method).kept
    assert kept is not None
    return kept


def test_what_is_the_same_to_the_bit_what_other_versions_explain_and_what_nothing_does(stored):
    kept = again()
    same = compare(stored, kept)
    assert (same.state, same.same_indices, same.max_difference, same.relative_difference) == ("same", 1.0, 0.0, 0.0)
    bits = kept.tokens.copy()
    bits[3, 5] ^= 1
    rounded = compare(stored, replace(kept, tokens=bits))
    assert (rounded.state, rounded.same_indices) == ("different", 1.0) and 0 < rounded.relative_difference < 0.01
    opposite = compare(stored, replace(kept, tokens=kept.tokens ^ -(2**15)))
    assert opposite.relative_difference == pytest.approx(2.0)
    other_versions = {"versions": {"torch": ("1", "2")}}
    assert explain_suspicion(same) == explain_suspicion(replace(rounded, **other_versions)) == ""
    assert "by the same versions, it is not the same" in explain_suspicion(rounded)
    assert "beyond rounding" in explain_suspicion(replace(opposite, **other_versions))


def test_positions_are_compared_by_what_both_have(stored):
    fewer = compare(stored, again(ratio=0.10))
    assert (fewer.state, fewer.max_difference) == ("different", 0.0)  # a prefix: the tokens that both have agree
    assert fewer.same_indices == 10 / 25
    kept, others = again(), sorted(set(range(100)) - set(stored.index.tolist()))
    moved = compare(stored, replace(kept, index=np.array(others[: len(kept.index)], np.int32)))
    assert (moved.same_indices, moved.max_difference) == (0.0, None)
    wide = compare(stored, again(random_tokens(0, (4, 25, 32))))
    assert (wide.state, wide.note, wide.same_indices) == ("different", "tokens of another size", 0.0)
    assert all("beyond rounding" in explain_suspicion(result) for result in (fewer, moved, wide))


def test_evidence_of_another_number_of_frames_is_a_difference(tmp_path):
    short, long = (
        encoded_with("v", random_tokens(n, (n, 25, 16)), 1.0, "none", {"frame_feature": torch.ones(n, 2)})
        for n in (4, 5)
    )
    identity = make_identity(1.0, "none", evidence={"frame_feature": "last_layer"})
    write_shard(write_header(tmp_path, identity=identity), "run", short)
    result = compare(TokenCache(tmp_path).get("v", order="selection", evidence=["frame_feature"]), long.kept)
    assert result.state == "different" and result.relative_difference > 0


def test_options_of_a_run_that_are_none_here_are_left_out(tmp_path, stored):
    cache = TokenCache(tmp_path)
    run = {"config": {"pruner": "uniform", "decoder": "not_here:Mine", "device": "cuda", "of_later": 1}}
    config = read_run_config(cache, run, "tiny")
    assert (config.pruner, config.decoder, config.device, config.model) == ("uniform", "auto", "auto", "tiny")
    assert config.out == str(tmp_path)


def test_a_source_that_does_not_decode_keeps_the_class_of_its_fault(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"no video")
    of_source = {"source_size": 8, "source_hash": "blake2b:00", "source_offset": None}
    row = {"video_id": "v", "uri": str(path), "start_s": None, "end_s": None, "attempts": 1, **of_source}
    with closing(VideoDecoder(DecodeSetup(Sampling(2), KeepSize()))) as decoder, pytest.raises(VideoFault) as caught:
        decode_again(row, decoder, Objects.from_environment(), Roots([tmp_path]))
    assert caught.value.fault_class == "unsupported"


def test_a_cache_that_does_not_say_how_it_was_made_is_refused(tmp_path, stored):
    with pytest.raises(UsageError, match="no record of a run says which model"):
        LiveCheck(TokenCache(tmp_path), None, Objects.from_environment())
    store = TokenCache(tmp_path).store
    store.put("runs/r1.json", b'{"run_id": "r1", "config": {"pruner": "not_here:Mine"}}')
    store.put("runs/r2.json", b"torn")  # the newest that can be read counts
    with pytest.raises(UsageError, match="what a cache says chooses no code"):
        LiveCheck(TokenCache(tmp_path), None, Objects.from_environment())
