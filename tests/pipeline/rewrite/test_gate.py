"""The gate: what it asks, how it judges, what it writes; a codec that loses is refused, another passes."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from gstep.backbones import ModelSource
from jobs import recode
from jobs.testbed.__main__ import main as make_shapes
from pipeline import TokenCache
from pipeline.cache.codecs import CODECS, TokenCodec
from pipeline.cache.codecs.sample import SAMPLE, keep_sample, sample_limit, sample_share, sample_store
from pipeline.cache.header import header_bytes
from pipeline.cache.reader import HEADER, UngatedCache, coded_header, read_header
from pipeline.cache.writer import KeptTokens, PrunedVideo
from pipeline.errors import UsageError
from pipeline.keys import keys_of
from pipeline.prune.one_video import LocalEncoder
from pipeline.rewrite import gate
from pipeline.rewrite.gate import PROMPTS, asked_of, gate_cache, lines_of, restored, run_gate
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.pipeline.asking import tiny_cache, write_questions
from tests.pipeline.caches import encoded, random_tokens, write_shard

NO_OBJECTS = Objects.from_environment()


def quiet(line: str) -> None:
    """Say nothing."""


def test_questions_are_those_about_videos_that_are_there(tmp_path):
    rows = [
        {"question_id": "1", "video_id": "a", "prompt": "How?"},
        {"question_id": "2", "video_id": ["a", "b"], "prompt": "Which?", "choices": ["x", "y"]},
        {"question_id": "3", "video_id": "gone", "prompt": "Who?"},
    ]
    path = str(write_questions(tmp_path / "q.jsonl", rows))
    asked = asked_of(path, ["a", "b"], NO_OBJECTS)
    assert [one.video_ids for one in asked] == [("a",), ("a", "b")]
    assert asked[0].text == "How?" and "A. x\nB. y\n" in asked[1].text and "letter" not in asked[1].text
    with pytest.raises(UsageError, match="no question is about a video"):
        asked_of(path, ["c"], NO_OBJECTS)


@pytest.mark.parametrize(("videos", "each"), [(1, 8), (4, 8), (200, 1), (900, 1)])
def test_fixed_prompts_are_spread_over_as_many_videos_as_there_are(videos, each):
    asked = asked_of("", [f"v{i}" for i in range(videos)], NO_OBJECTS)
    assert len(asked) == min(200, 8 * videos) == len(set(asked))
    assert len({one.video_ids for one in asked}) == min(videos, 200)
    assert {one.text for one in asked} == set(PROMPTS) and len(asked) / len({one.video_ids for one in asked}) == each


def test_what_goes_beyond_the_floor_has_an_interval_over_videos():
    about = [(f"v{i // 4}",) for i in range(80)]
    values, floor = np.zeros(80), np.zeros(80)
    values[:8], floor[4:8] = 1.0, 1.0  # all of the first two videos change, those of one of them by noise too
    found = gate.excess(values, floor, about, 0.1)
    assert found["mean"] == pytest.approx(0.05) and found["floor"] == pytest.approx(0.05) and found["bound"] == 0.1
    assert found["low"] == 0.0 and found["high"] == pytest.approx(0.15)  # 3 of 20 videos, by the binomial
    alone = gate.excess(values, floor, [("v",)] * 80, 0.1)  # of one video: answer by answer
    assert alone["high"] == pytest.approx(0.1125, abs=0.02)


def signs(seed: int, shape: tuple[int, int, int] = (4, 49, 64)) -> torch.Tensor:
    """Draw tokens of -1 and 1, which int8 stores without a loss."""
    return random_tokens(seed, shape).sign()


@pytest.fixture
def whole(tmp_path):
    tiny_cache(tmp_path / "whole", ("a", "b", "c", "d"), ratio=0.25, hidden_size=64)
    return tmp_path / "whole"


def test_a_gate_that_passes_is_in_the_header_and_one_that_refuses_writes_nothing(whole, tmp_path, capsys):
    """The tiny model's weights are random, which is enough: its answers follow from the tokens all the same."""
    argv = ["--token-codec", "int8", "--out", str(tmp_path / "out"), "--json", "--gate"]
    assert recode.main([str(whole), *argv]) == 1
    said = capsys.readouterr().err
    assert "the gate refuses int8" in said and not (tmp_path / "out").exists()
    tiny_cache(tmp_path / "signs", ("a", "b", "c", "d"), hidden_size=64, draw=signs)
    assert recode.main([str(tmp_path / "signs"), *argv]) == 0
    told = capsys.readouterr()
    assert "int8 passes (32 answers" in told.err
    record = read_header(LocalStore(tmp_path / "out"))["gate"]
    assert json.loads(told.out)["gate"] == record
    assert record["passed"] and (record["answers"], record["videos"], record["codec"]) == (32, 4, "int8")
    assert record["changed"]["floor"] == 0.0 and record["answer_tokens"] > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UngatedCache)
        TokenCache(tmp_path / "out")


def test_a_cache_without_a_gate_says_so_whenever_it_is_opened(whole, tmp_path):
    assert recode.main([str(whole), "--out", str(tmp_path / "out")]) == 0
    store = LocalStore(tmp_path / "out")
    for _ in range(2):
        with pytest.warns(UngatedCache, match="holds tokens as int4, and no gate has compared"):
            TokenCache(tmp_path / "out")
    excess = {"mean": 0.25, "low": 0.2, "high": 0.3, "floor": 0.0, "bound": 0.1}
    store.put(HEADER, header_bytes({**read_header(store), "gate": {"passed": False, "changed": excess}}))
    with pytest.warns(UngatedCache, match=r"the gate refused it: 25.0% more of its answers"):
        TokenCache(tmp_path / "out")


def test_a_sample_is_kept_until_a_gate_has_passed(tmp_path):
    store = tiny_cache(tmp_path / "c", ("a", "b", "c", "d"), hidden_size=64, draw=signs)
    ids = TokenCache(tmp_path / "c").video_ids
    header = coded_header(read_header(store), "int8")
    coded = LocalStore(tmp_path / "coded")
    coded.make()
    coded.put(HEADER, header_bytes(header))
    with pytest.raises(UsageError, match="has no sample"):
        gate_cache(coded, "", None, NO_OBJECTS, quiet)
    videos = [encoded(name, signs(i), 0.25, "gstep") for i, name in enumerate(ids)]
    write_shard(coded, "run", *videos)
    limit = sample_limit(pa.chunked_array([pa.array(ids)]), 3)
    sample = sample_store(coded)
    sample.make()
    sample.put(HEADER, header_bytes(coded_header(header, "bfloat16")))
    for _ in range(2):  # a task that is tried again writes the same files
        keep_sample(videos, limit, coded, "run")
    held = TokenCache(tmp_path / "coded" / SAMPLE)
    assert len(held.video_ids) == 3 and len(list((tmp_path / "coded" / SAMPLE / "tokens").iterdir())) == 1
    whole = TokenCache(tmp_path / "c")
    assert all(torch.equal(held.get(name).tokens, whole.get(name).tokens) for name in held)
    few = gate_cache(coded, "", None, NO_OBJECTS, quiet)
    assert (few["passed"], few["answers"], few["changed"]["mean"]) == (False, 24, 0.0) and sample.exists(HEADER)
    assert not read_header(coded)["gate"]["passed"]
    keep_sample(videos, 2**64, coded, "more")
    assert gate_cache(coded, "", None, NO_OBJECTS, quiet)["passed"] and not sample.exists(HEADER)
    assert read_header(coded)["gate"]["passed"] and not list((tmp_path / "coded" / SAMPLE).rglob("*.parquet"))


def test_the_largest_hash_of_a_sample():
    ids = pa.chunked_array([pa.array(["a", "b"]), pa.array(["c"])])
    limits = [sample_limit(ids, count) for count in (0, 1, 2, 3, 9)]
    assert limits[0] == -1 and limits[1] < limits[2] < limits[3] == limits[4]
    assert sample_limit(ids.slice(0, 0), 5) == -1


def test_a_share_of_videos_that_are_not_known_is_about_the_sample_that_was_asked_for():
    ids = pa.array([f"v{number}" for number in range(20_000)])
    hashes = keys_of(ids)[:, 0].tolist()
    for count, n_videos, low, high in ((200, 20_000, 150, 250), (200, 3, 20_000, 20_000), (0, 9, 0, 0), (5, 0, 0, 0)):
        limit = sample_share(count, n_videos)
        assert low <= sum(key <= limit for key in hashes) <= high


@pytest.mark.slow
def test_eight_outlier_channels_fail_plain_int4_and_pass_the_shipped_one(tmp_path):
    """Tokens of the trained model `shapes`, eight channels of which are 50 times as large."""
    assert make_shapes(["make", str(tmp_path), "--videos", "16", "--split", "development", "--seed", "3"]) == 0
    source, encoder = ModelSource.resolve("shapes"), LocalEncoder(model="shapes", num_frames=8)
    store = tiny_cache(tmp_path / "c", ("other",), source=source, shape=(4, 49, 128))
    channels = torch.randperm(128, generator=torch.Generator().manual_seed(5))[:8]
    for number, path in enumerate(sorted((tmp_path / "data").glob("*.mp4"))):
        video = encoder(str(path))
        pruned, order = video.pruned, video.pruned.selection_order()
        tokens = pruned.tokens[order].clone()
        tokens[:, channels] *= 50
        index, rank = (values[order].to(torch.int32).numpy() for values in (pruned.index, pruned.rank))
        kept = KeptTokens(tokens.view(torch.int16).numpy(), index, rank)
        write_shard(store, f"run{number}", PrunedVideo({**video.record, "video_id": f"data/{path.name}"}, kept))
    cache, found = TokenCache(tmp_path / "c"), {}
    asked = asked_of(str(tmp_path / "questions.jsonl"), cache.video_ids, NO_OBJECTS)
    for codec in (TokenCodec("plain-int4", 4, 32), CODECS["int4"]):

        def pair(name, codec=codec):
            video = cache.get(name)
            return video, restored(video, codec)

        found[codec.name] = run_gate(asked, pair, source, codec, "", quiet)
        print(*lines_of(found[codec.name]), sep="\n")
    assert not found["plain-int4"]["passed"] and found["int4"]["passed"]
    assert found["plain-int4"]["changed"]["mean"] > 0.05 and found["int4"]["changed"]["mean"] < 0.03


def test_restored_levels_are_those_of_the_codec(whole):
    video = TokenCache(whole).get("a")
    found = restored(replace(video, deepstack=(video.tokens,)), CODECS["int4"])
    assert torch.equal(found.tokens, found.deepstack[0]) and not torch.equal(found.tokens, video.tokens)
