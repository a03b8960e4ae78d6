"""Evidence of each token in a cache: bit for bit, read only where it is asked for, and part of what the cache is."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.evidence import LAST_LAYER, SINGLE_PATCHES
from pipeline import CorruptShard, EvidenceNotCached, TokenCache
from pipeline.cache.header import read_header
from pipeline.cache.table import VideosTable
from pipeline.errors import UsageError, VideoFault
from pipeline.prune.batches import pack, unpack_batch
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.prune.recipe import parse_evidence
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, ObjectStore, Store
from pipeline.verify.checks import check_token_shard
from tests.builders.caches import (
    WIDTH,
    encoded,
    evidence_cache,
    make_cache,
    make_identity,
    random_evidence,
    random_tokens,
    source_record,
    write_header,
    write_shard,
)
from tests.builders.stores import S3Server
from tests.pipeline.cache.test_reader import CountingStore, bits

SHAPE = (8, 49, 256)
BOTH = ("image_embedding", "token_attention")


@pytest.mark.parametrize(
    ("method", "ratio", "asked"), [("none", 1.0, None), ("gstep", 0.25, 0.1), ("uniform", 0.25, None)]
)
def test_evidence_comes_back_bit_for_bit_beside_its_tokens(tmp_path, method, ratio, asked):
    tokens, evidence = random_tokens(0, SHAPE), random_evidence(SHAPE)
    evidence_cache(tmp_path, {"u": random_tokens(1, (4, 9, 256)), "v": tokens}, ratio, method)
    cache = TokenCache(tmp_path)
    assert cache.evidence == {"image_embedding": "single_patches", "token_attention": "last_layer"}
    expected = gstep.prune(tokens, asked or ratio, method)
    for order in ("index", "selection"):
        video = cache.get("v", asked, order, evidence=BOTH[::-1])
        places = expected.index if order == "index" else expected.index[expected.compute_selection_order()]
        assert torch.equal(video.index, places) and list(video.evidence) == list(BOTH[::-1])
        for name, values in evidence.items():
            assert torch.equal(bits(video.evidence[name]), bits(values.bfloat16().flatten(0, 1)[places]))
        assert video.evidence["image_embedding"].shape == (len(places), WIDTH)
    assert cache.get("v").evidence == {}
    assert list(cache.get("v", evidence=["token_attention"]).evidence) == ["token_attention"]


def test_who_does_not_ask_reads_no_byte_of_it(tmp_path):
    """Nor any other byte than those of the columns that make up a token."""
    evidence_cache(tmp_path, {f"v{i}": random_tokens(i, SHAPE) for i in range(2)})
    store = CountingStore(tmp_path)
    cache = TokenCache(tmp_path, store=store)
    row = cache.get("v1").metadata  # opens the shard
    shard = pq.read_metadata(tmp_path / row["token_shard"])

    def stored(n_groups, *names):
        groups = [shard.row_group(row["first_row_group"] + i) for i in range(n_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in names)

    def read(ratio, evidence=()):
        store.read_bytes = 0
        assert len(cache.get("v1", ratio, evidence=evidence).evidence) == len(evidence)
        return store.read_bytes

    plain = ("rank", "index", "frame", "token", "merged", "density")
    for ratio, n_groups in ((0.10, 1), (0.15, 2), (0.25, 4)):
        assert read(ratio) == stored(n_groups, *plain)
        assert read(ratio, ("image_embedding",)) == stored(n_groups, *plain, "image_embedding")


def test_an_object_store_is_asked_for_nothing_else_either():
    videos = {f"v{i}": random_tokens(i, (8, 49, 1024)) for i in range(2)}
    fetched = []

    class Counting(Objects):
        def read_slice(self, uri, start, end=None):
            piece = super().read_slice(uri, start, end)
            fetched.append(len(piece.data))
            return piece

    with S3Server() as server:
        stores = {name: ObjectStore(server.uri(name), server.objects()) for name in ("with", "without")}
        evidence_cache(stores["with"], videos)
        make_cache(stores["without"], videos)
        sizes = {}
        for name, store in stores.items():
            cache = TokenCache(store.root, store=ObjectStore(store.root, Counting(**store.objects._settings)))
            cache.get("v0")
            fetched.clear()
            video = cache.get("v0")
            sizes[name] = sum(fetched), len(fetched)
            assert torch.equal(video.tokens, gstep.prune(videos["v0"], 0.25).tokens)
        assert sizes["with"] == (sizes["without"][0], 4)  # a request for each row group, evidence lying between them
        assert sizes["without"][1] == 1


def test_what_is_not_there_is_said(tmp_path):
    evidence_cache(tmp_path / "c", {"v": random_tokens(0, SHAPE)})
    make_cache(tmp_path / "plain", {"v": random_tokens(0)})
    with pytest.raises(EvidenceNotCached, match=r"it has none.*--evidence image_embedding"):
        TokenCache(tmp_path / "plain").get("v", evidence=["image_embedding"])
    with pytest.raises(EvidenceNotCached, match=r"no evidence token_key .*has image_embedding, token_attention"):
        TokenCache(tmp_path / "c").get("v", evidence=["image_embedding", "token_key"])
    store = LocalStore(tmp_path / "c")
    write_shard(store, "other", encoded("w", random_tokens(0, SHAPE), 0.25, "gstep"))
    with pytest.raises(CorruptShard, match="has no column image_embedding"):
        TokenCache(tmp_path / "c").get("w", evidence=["image_embedding"])


FRAMES = np.random.default_rng(0).integers(0, 256, (2, 384, 384, 3), dtype=np.uint8)


def decoded():
    return source_record("v", (2, 196, 64), height=384, width=384), FRAMES


@pytest.fixture(scope="module")
def source():
    return family_of(ModelSource.resolve("tiny")).with_pooling_head("tiny")


def store_encoded(folder, setup: EncodeSetup) -> tuple[Store, str]:
    """Encode the frames into a cache; returns it with the name of its videos shard."""
    store = write_header(folder, identity=make_identity(setup.retention_ratio, setup.pruner, evidence=setup.evidence))
    videos = unpack_batch(pack([VideoEncoder(setup).encode_video_alone(*decoded())]))  # as they cross the object store
    return store, write_shard(store, "run", *videos)


def encode_frames(source, asked) -> gstep.VisualTokens:
    return family_of(source).load(choose_runtime("cpu", "float32")).encode(FRAMES, asked)


def evidence_bytes(setup: EncodeSetup) -> int:
    """What a video's evidence takes more."""
    plain = replace(setup, evidence={})
    return setup.estimate_video_bytes(2, 384, 384) - plain.estimate_video_bytes(2, 384, 384)


@pytest.mark.parametrize(("method", "ratio"), [("none", 1.0), ("gstep", 0.25)])
def test_what_the_encoder_gives_is_stored_at_the_kept_places(source, tmp_path, method, ratio):
    asked = {"image_embedding": SINGLE_PATCHES, "token_key": LAST_LAYER, "token_attention": LAST_LAYER}
    setup = EncodeSetup(source, method, ratio, device="cpu", evidence=asked)
    assert evidence_bytes(setup) == 2 * round(ratio * 2 * 196) * (64 + 32 + 1)  # numbers of a token's evidence
    store_encoded(tmp_path, setup)
    visual = encode_frames(source, asked)
    video = TokenCache(tmp_path).get("v", evidence=tuple(asked))
    assert len(video.index) == round(ratio * 392)
    for name, values in visual.evidence.items():
        assert torch.equal(video.evidence[name], values.bfloat16().flatten(0, 1)[video.index]), name
    assert torch.equal(video.tokens, visual.tokens.bfloat16().flatten(0, 1)[video.index])


def test_evidence_that_is_not_finite_is_a_fault(source):
    encoder = VideoEncoder(EncodeSetup(source, "none", 1.0, device="cpu", evidence={"image_embedding": SINGLE_PATCHES}))
    encoder.backbone.pooling_head.head.mlp.fc2.bias.fill_(float("nan"))
    with pytest.raises(VideoFault, match="the evidence image_embedding has values that are not finite") as caught:
        encoder.encode_video_alone(*decoded())
    assert (caught.value.fault_class, caught.value.stage) == ("internal", "encode")


GSTEP, FASTVID, NONE = (gstep.make_pruner(name) for name in ("gstep", "fastvid", "none"))
LLAVA = "llava_onevision"


@pytest.mark.parametrize(
    ("asked", "model", "pruner", "why"),
    [
        (["magic"], LLAVA, GSTEP, "'magic' is no evidence and no method; known: frame_feature, token_attention"),
        (["vidcom"], LLAVA, GSTEP, r"no method \(did you mean vidcom2\?\); known: frame"),
        (["llm_attention"], LLAVA, GSTEP, "'llm_attention' comes from no vision encoder"),
        (["frame_feature"], LLAVA, GSTEP, "describes frames and can only be stored with all tokens, since --pruner gs"),
        (["fastvid"], LLAVA, GSTEP, "frame_feature describes frames"),
        (["image_embedding,"], LLAVA, GSTEP, "'' is no evidence and no method"),
        (["token_attention"], LLAVA, GSTEP, r"last_layer \(.*\) or pooling_head \(.*\): name one"),
        (["token_attention=x"], LLAVA, GSTEP, "gives it from last_layer or pooling_head"),
        (["image_embedding"], LLAVA, FASTVID, "--pruner fastvid merges tokens"),
        (["image_embedding"], "qwen3_vl", GSTEP, "qwen3_vl does not give it; this model needs none: methods compare"),
        (["token_key"], "qwen2_5_vl", GSTEP, "qwen2_5_vl does not give it; models of type llava_onevision do"),
    ],
)
def test_what_cannot_be_stored_is_refused(asked, model, pruner, why):
    with pytest.raises(UsageError, match=why):
        parse_evidence(asked, model, pruner)


BOTH_ATTENTIONS = "token_attention=last_layer, token_key", "token_attention=pooling_head"
OF_PATCHES = {
    *("image_embedding_single_patches", "token_key_last_layer"),
    *("token_attention_last_layer", "token_attention_pooling_head"),
}


@pytest.mark.parametrize(
    ("asked", "model", "pruner", "labels"),
    [
        (["image_embedding", *BOTH_ATTENTIONS], LLAVA, GSTEP, OF_PATCHES),
        (["token_attention"], "qwen3_vl", GSTEP, {"token_attention_merged_queries"}),
        ([], "qwen3_vl", FASTVID, set()),
        (["gstep,fastvid", "visionzip", "cdpruner,fastv"], LLAVA, NONE, {"frame_feature_pooling_head", *OF_PATCHES}),
        (["gstep,fastvid,cdpruner,fastv,visionzip"], "qwen2_5_vl", NONE, {"token_attention_merged_queries"}),
    ],
)
def test_evidence_and_what_methods_look_at_is_found_where_it_lies(asked, model, pruner, labels):
    sources = parse_evidence(asked, model, pruner)
    assert set(sources) == labels and all(label.endswith(f"_{source}") for label, source in sources.items())


def test_one_name_of_two_sources_and_evidence_of_frames_come_back_bit_for_bit(source, tmp_path):
    """Every method's evidence of LLaVA-OneVision beside all tokens; a name that has two sources must be told apart."""
    asked = parse_evidence(["fastvid,visionzip"], "llava_onevision", NONE)
    setup = EncodeSetup(source, "none", 1.0, device="cpu", evidence=asked)
    assert evidence_bytes(setup) == 2 * 2 * (196 * (1 + 1 + 32) + 64)  # of a token, and a feature of a frame
    store, commit = store_encoded(tmp_path, setup)
    stored = TokenCache(tmp_path).get("v", evidence=(*asked, "frame_feature"))
    seen = encode_frames(source, asked).evidence
    assert stored.evidence["frame_feature"].shape == (2, 64)
    for name, values in seen.items():
        expected = values.bfloat16() if name.startswith("frame_feature") else values.bfloat16().flatten(0, 1)
        assert torch.equal(bits(stored.evidence[name]), bits(expected)), name
    assert not torch.equal(seen["token_attention_last_layer"], seen["token_attention_pooling_head"])
    with pytest.raises(EvidenceNotCached, match="token_attention as token_attention_last_layer and as token_atten"):
        TokenCache(tmp_path).get("v", evidence=["token_attention"])
    row = VideosTable(store).read_row(commit, 0)
    assert not check_token_shard(store, row["token_shard"], [(commit, row)], read_header(store)).problems


def test_methods_see_evidence_as_it_is_stored(source):
    """Rounded before they choose, so that a cache of all tokens serves the very same selection later."""
    setup = EncodeSetup(source, "visionzip", 0.25, device="cpu")
    exact = encode_frames(source, gstep.make_pruner("visionzip").sources)
    rounded = {name: value.bfloat16() for name, value in exact.evidence.items()}
    expected = gstep.prune(exact.tokens.bfloat16(), 0.25, "visionzip", evidence=rounded)
    kept = VideoEncoder(setup).encode_video_alone(*decoded()).kept
    assert kept is not None and kept.index.tolist() == expected.index[expected.compute_selection_order()].tolist()
