"""A cache as datasets of torch: every video once, on whatever rank and worker, and on from where it was left."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import chain, combinations, groupby

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from pipeline import IterableTokenDataset, Packed, TokenCache, TokenDataset, UnknownVideo, pack
from pipeline.datasets.packing import select_videos
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.pipeline.datasets.caches import IDS, SIZES, dataset, ids_of, make_shards


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_places_are_those_of_the_ids(folder):
    cache = TokenCache(folder)
    data = TokenDataset(folder, ["v07", "v02"], retention_ratio=0.1)
    assert (len(data), ids_of(data.__getitems__([1, 0, 1])), len(TokenDataset(cache))) == (2, ["v02", "v07", "v02"], 19)
    assert same(data[0].tokens, cache.get("v07", 0.1).tokens) and data[-1].video_id == "v02"
    with pytest.raises(IndexError):
        data[2]
    with pytest.raises(UnknownVideo, match="nope"):
        TokenDataset(cache, ["nope"])[0]


@pytest.mark.parametrize("kind", [TokenDataset, IterableTokenDataset])
def test_ids_are_a_list_of_any_kind_and_no_text(folder, kind):
    for names in (np.array(IDS[3:6]), pd.Series(IDS[3:6]), pd.Series(IDS)[[5, 4, 3]], tuple(IDS[3:6])):
        data = kind(folder, names)
        videos = data if kind is IterableTokenDataset else [data[place] for place in range(len(data))]
        assert sorted(ids_of(videos)) == IDS[3:6]
    for options in {"ids": "v00"}, {"evidence": "token_key"}:
        ((name, text),) = options.items()
        with pytest.raises(ValueError, match=f"{name} must be a list of names, got '{text}'"):
            kind(folder, **options)


def test_workers_make_batches_without_padding(folder):
    cache = TokenCache(folder)
    cache.get("v00")  # a shard is open where it forks
    data = pickle.loads(pickle.dumps(TokenDataset(cache)))  # noqa: S301 - as a worker that is spawned gets it
    batches = list(DataLoader(data, 8, num_workers=2, collate_fn=pack, multiprocessing_context="fork"))
    assert list(chain.from_iterable(batch.video_ids for batch in batches)) == IDS
    for batch in batches:
        videos = cache.get_many(batch.video_ids)
        assert same(batch.tokens, torch.cat([video.tokens for video in videos]))
        assert torch.equal(batch.index, torch.cat([video.index for video in videos]))
        assert batch.cu_seqlens.tolist() == [25 * i for i in range(len(videos) + 1)] and batch.tokens.is_shared()
        assert batch.metadata == tuple(video.metadata for video in videos)


def test_every_tensor_of_a_batch_is_pinned_and_moved(folder, monkeypatch):
    video = with_evidence(TokenCache(folder).get("v00"), 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.to("meta"))  # pinning needs a GPU
    batch = pack([video, video])
    assert [*batch] == ["lengths", "tokens", "index", "frame", "deepstack_0", "evidence_frame_feature", "metadata"]
    for moved in batch.pin_memory(), batch.to("meta", non_blocking=True):
        assert [*moved] == [*batch] and all(tensor.is_meta for tensor in moved.values())
        assert moved.metadata == batch.metadata == (video.metadata, video.metadata)
        assert moved.deepstack[0].is_meta


def with_evidence(video, n_frames: int):
    evidence = {"frame_feature": torch.full((n_frames, 3), float(n_frames))}
    return replace(video, evidence=evidence, deepstack=(video.tokens + n_frames,))


def test_batches_are_joined_by_name_and_selected_by_videos(folder):
    videos = [with_evidence(video, 2 + i) for i, video in enumerate(TokenCache(folder).get_many(IDS[:4]))]
    videos[1] = replace(videos[1], **{name: getattr(videos[1], name)[:7] for name in ("tokens", "index", "frame")})
    videos[1] = replace(videos[1], deepstack=(videos[1].deepstack[0][:7],))
    first, second, whole = pack(videos[:1]), pack(videos[1:]), pack(videos)
    joined = Packed({name: torch.cat([first[name], second[name]]) for name in first})
    assert joined.cu_seqlens.tolist() == [0, 25, 32, 57, 82] and joined.metadata == whole.metadata
    for start, end in combinations(range(6), 2):
        part, videos_here = joined.select(slice(start, end)), videos[start:end]
        assert part.video_ids == tuple(IDS[start : min(end, 4)])
        if videos_here:
            expected = pack(videos_here)
            assert [*part] == [*expected] and all(torch.equal(part[name], expected[name]) for name in part)
            assert [len(rows) for rows in part.evidence["frame_feature"]] == [2 + i for i in range(start, min(end, 4))]
    nested = select_videos({"batch": joined, "labels": (torch.arange(4), "text")}, slice(1, 3))
    assert nested["batch"].video_ids == ("v01", "v02")
    assert nested["labels"][0].tolist() == [1, 2] and nested["labels"][1] == "text"
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        Packed({name: tensor[:4] for name, tensor in joined.items()})


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (2, 2), (3, 0)])
def test_every_video_comes_once_on_whatever_rank_and_worker(folder, world_size, workers):
    found = []
    for rank in range(world_size):
        data = IterableTokenDataset(folder, shuffle=True, seed=3, rank=rank, world_size=world_size)
        videos = ids_of(DataLoader(data, batch_size=None, num_workers=workers))
        assert len(videos) == len(data)
        found += videos
    assert sorted(found) == IDS


def test_ranks_see_by_their_states_whether_they_opened_the_same_cache(tmp_path):
    store = make_shards(tmp_path)

    def ids_seen_by(rank: int) -> str:
        return IterableTokenDataset(tmp_path, rank=rank, world_size=2).state_dict()["ids"]

    before = ids_seen_by(0)
    assert ids_seen_by(1) == before
    write_shard(store, "run9", encoded("new", random_tokens(9), 0.25, "gstep"))
    assert ids_seen_by(1) != before


def test_the_order_is_of_seed_and_epoch(folder):
    def order(epoch: int = 0, **more) -> list[str]:
        data = IterableTokenDataset(folder, **{"shuffle": True, **more})
        data.set_epoch(epoch)
        return ids_of(data)

    assert order(shuffle=False) == IDS and order() == order() != IDS
    assert len({tuple(order(epoch, seed=seed)) for epoch in range(2) for seed in range(2)}) == 4
    cache = TokenCache(folder)
    shards = [cache.metadata(name)["token_shard"] for name in order(mix=1)]
    assert len(list(groupby(shards))) == len(SIZES)  # one by one


def test_even_ranks_leave_out_what_the_others_lack(folder):
    parts = [IterableTokenDataset(folder, shuffle=True, even=True, rank=rank, world_size=2) for rank in range(2)]
    found = [ids_of(part) for part in parts]
    whole = [len(IterableTokenDataset(folder, shuffle=True, rank=rank, world_size=2)) for rank in range(2)]
    assert len(found[0]) == len(found[1]) == len(parts[0]) == min(whole) < max(whole)
    assert len({*found[0], *found[1]}) == 2 * min(whole)
    with pytest.raises(ValueError, match=rf"even: {len(SIZES)} token shards .* none would get a video: take TokenData"):
        IterableTokenDataset(folder, even=True, rank=0, world_size=len(SIZES) + 1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_even_ranks_have_as_many_batches_with_workers_too(folder, drop_last):
    batches = []
    for rank in range(2):
        data = IterableTokenDataset(folder, shuffle=True, even=True, rank=rank, world_size=2)
        loader = DataLoader(data, batch_size=2, num_workers=2, collate_fn=pack, drop_last=drop_last)
        batches.append([list(batch.video_ids) for batch in loader])
    assert [len(batch) for batch in batches[0]] == [len(batch) for batch in batches[1]]
    videos = [*chain(*batches[0], *batches[1])]
    assert len(set(videos)) == len(videos) == (2 * len(data) if not drop_last else 4 * len(batches[0]))


def test_it_goes_on_where_it_was_left(folder):
    data = dataset(folder)
    data.set_epoch(2)
    whole = ids_of(data)
    for n in (0, 1, 8, 11, len(IDS) - 1):
        videos = iter(data)
        begun = [next(videos).video_id for _ in range(n)]
        state = pickle.loads(pickle.dumps(data.state_dict()))  # noqa: S301
        other = dataset(folder, state)
        assert other.state_dict() == state and begun + ids_of(other) == whole
        assert ids_of(other) == whole  # the iteration behind it starts at the beginning
    assert not state["finished"] and (state["done"], state["epoch"]) == (len(IDS) - 1, 2)
    other.load_state_dict(state)
    other.set_epoch(2)  # the epoch that it is in
    assert ids_of(other) == whole[-1:]
    with pytest.raises(ValueError, match="other data: order"):
        iter(dataset(folder, state, seed=6))
