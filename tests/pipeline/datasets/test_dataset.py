"""A cache as datasets of torch: every video once on whatever rank and worker, and states of an epoch to go on from."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import chain, combinations, groupby
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeline import IterableTokenDataset, Packed, TokenCache, TokenDataset, UnknownVideo, pack
from pipeline.datasets.packing import select_videos
from pipeline.errors import RemovedVideo
from pipeline.rewrite.compact import join_tokens
from pipeline.rewrite.remove import remove_videos
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.interpreter import run_python
from tests.paths import ROOT, python_path
from tests.pipeline.datasets.caches import IDS, N_VIDEOS, SIZES, dataset, ids_of, make_shards


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


NOW = timedelta(0)


@pytest.fixture
def accelerate() -> Iterator[Callable[..., DataLoader]]:
    """A function that prepares a loader by an Accelerator, whose state ends with the test."""

    def prepare(loader: DataLoader, **how) -> DataLoader:
        return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**how)).prepare(loader)

    yield prepare
    AcceleratorState._reset_state(reset_partial_state=True)


def epoch_of(folder, epoch: int, **more) -> list[str]:
    data = dataset(folder, **more)
    data.set_epoch(epoch)
    return ids_of(data)


def test_the_end_of_an_epoch_begins_the_next_one(folder):
    data = dataset(folder)
    data.set_epoch(2)
    ids_of(data)
    state = pickle.loads(pickle.dumps(data.state_dict()))  # noqa: S301
    assert (state["epoch"], state["done"], state["finished"]) == (2, len(IDS), True)  # its own number
    for epoch, begins in (None, 3), (2, 3), (3, 3), (7, 7), (0, 0):
        other = dataset(folder, state)
        assert other.state_dict() == state
        if epoch is not None:
            other.set_epoch(epoch)
        assert ids_of(other) == epoch_of(folder, begins) and other.state_dict()["epoch"] == begins
        assert ids_of(other) == epoch_of(folder, begins)  # again, as for any dataset


def test_another_epoch_begins_at_its_start(folder):
    data = dataset(folder)
    for read in ids_of, lambda videos: next(iter(videos)):  # to the end of an epoch, and to its middle
        epoch = data.state_dict()["epoch"]
        assert read(data)
        data.set_epoch(epoch)  # the same: nothing changes
        assert data.state_dict()["done"] > 0
        data.set_epoch(epoch + 1)
        state = data.state_dict()
        assert (state["epoch"], state["done"], state["finished"]) == (epoch + 1, 0, False)
        other = dataset(folder, state)
        assert ids_of(other) == epoch_of(folder, epoch + 1)


def test_an_iteration_that_set_epoch_ended_counts_no_more(folder):
    data = dataset(folder)
    videos = iter(data)
    begun = [next(videos).video_id]
    data.set_epoch(1)
    assert begun + ids_of(videos) == epoch_of(folder, 0)  # in its own order
    assert (data.state_dict()["epoch"], data.state_dict()["done"]) == (1, 0)


def test_the_state_of_what_workers_read_is_not_known(folder):
    data = dataset(folder)
    loader = DataLoader(data, batch_size=None, num_workers=1)
    list(loader)
    with pytest.raises(ValueError, match=r"worker processes read .* StatefulDataLoader"):
        data.state_dict()
    data.set_epoch(4)
    assert (data.state_dict()["epoch"], data.state_dict()["done"]) == (4, 0)
    list(loader)
    list(data)  # here
    assert data.state_dict()["finished"]


def test_a_state_of_the_middle_is_not_for_workers_and_one_of_the_end_is(folder):
    data = dataset(folder)
    videos = iter(data)
    next(videos)
    middle = data.state_dict()
    list(videos)
    for workers in 1, 2:
        other = dataset(folder)
        loader = DataLoader(other, batch_size=None, num_workers=workers)
        other.load_state_dict(middle)
        with pytest.raises(ValueError, match="no worker process read: resume without workers, or"):
            list(loader)
        other.load_state_dict(data.state_dict())
        following = ids_of(loader)
        assert sorted(following) == IDS and (workers > 1 or following == epoch_of(folder, 1))
    with pytest.raises(ValueError, match="worker processes read"):
        other.state_dict()


@pytest.mark.parametrize("workers", [0, 3])
def test_stateful_loaders_go_on_where_they_were_left(folder, workers):
    def loader_of(data) -> StatefulDataLoader:
        first = lambda batch: batch[0].video_id  # noqa: E731
        return StatefulDataLoader(data, num_workers=workers, persistent_workers=workers > 0, collate_fn=first)

    def resumed(done: int, *epochs: int) -> list[list[str]]:
        """Load a state, then read the rest of that epoch and those behind it; ``epochs`` are set before each."""
        other = dataset(folder)
        loader = loader_of(other)
        loader.load_state_dict(states[done])
        read = []
        for epoch in epochs or (None,):
            if epoch is not None:
                other.set_epoch(epoch)
            read.append(list(loader))
        return read

    data, middle = dataset(folder), (3, len(IDS) - 2)  # behind which a worker of 3 has read all of its videos
    data.set_epoch(3)
    loader, whole, states = loader_of(data), [], {}
    for video_id in loader:
        whole.append(video_id)
        if len(whole) in middle:
            states[len(whole)] = loader.state_dict()
    states[len(IDS)] = loader.state_dict()
    data.set_epoch(4)
    following = list(loader)
    assert sorted(whole) == sorted(following) == IDS and following != whole
    for done in middle:
        assert resumed(done, 3, 4) == [whole[done:], following]
    assert resumed(len(IDS)) == resumed(len(IDS), 4) == [following]


def test_a_loader_of_accelerate_is_a_batch_ahead(folder, accelerate):
    def prepare(data, batch: int = 1, **how) -> DataLoader:
        return accelerate(DataLoader(data, batch, collate_fn=lambda videos: torch.ones(len(videos))), **how)

    for dispatch, batch in (None, 1), (None, 4), (False, 4):
        data, given = dataset(folder), 0
        for ones in prepare(data, batch, dispatch_batches=dispatch):
            given += len(ones)
            assert data.state_dict()["done"] == given
        assert given == len(IDS) and data.state_dict()["finished"]
    stateful = prepare(data, use_stateful_dataloader=True)
    batches = iter(stateful)
    for given in range(1, 4):
        next(batches)
        assert data.state_dict()["done"] == given
    other = dataset(folder)
    resumed = prepare(other, use_stateful_dataloader=True)
    resumed.load_state_dict(stateful.state_dict())
    assert sum(map(len, resumed)) == len(IDS) - given
    middle = {**data.state_dict(), "epoch": 3}
    other.load_state_dict(middle)
    loader = prepare(other)
    with pytest.raises(ValueError, match=r"begins epoch 0, but .* epoch 3: call set_epoch\(3\) of the loader"):
        next(iter(loader))
    loader.set_epoch(3)
    other.load_state_dict(middle)
    assert sum(map(len, loader)) == len(IDS) - given


@pytest.mark.parametrize("kind", [IterableTokenDataset, TokenDataset])
def test_a_single_process_reads_packed_batches_by_a_loader_of_accelerate(folder, accelerate, kind):
    loader, cache = accelerate(DataLoader(kind(folder), 4, collate_fn=pack)), TokenCache(folder)
    for _ in range(2):  # epochs
        batches = list(loader)
        assert [name for batch in batches for name in batch.video_ids] == IDS
        for batch in batches:
            assert torch.equal(batch.tokens, pack(cache.get_many(batch.video_ids)).tokens)


@pytest.mark.parametrize("even", [False, True])
def test_an_epoch_goes_on_while_its_cache_is_compacted_and_videos_are_removed(tmp_path, caplog, even):
    store = make_shards(tmp_path)
    expected = epoch_of(tmp_path, 0, mix=1)
    data = dataset(tmp_path, mix=1, even=even)
    videos = iter(data)
    begun = [next(videos).video_id]
    removed = {expected[-1], expected[-2], expected[10]}
    for _ in range(2):
        join_tokens(store, lambda line: None, NOW)
    remove_videos(store, sorted(removed), "asked for", lambda line: None, NOW)
    rest = ids_of(videos)
    left = [video_id for video_id in expected if video_id not in removed]
    assert begun + rest[: len(left) - 1] == left
    assert rest[len(left) - 1 :] == ([left[-1]] * 3 if even else [])  # ranks keep step
    state = data.state_dict()
    assert (state["done"], state["removed"], state["finished"]) == (len(IDS), 3, True)
    assert "3 videos were removed since this dataset was made" in caplog.text
    caplog.clear()
    assert sorted(ids_of(dataset(tmp_path))) == sorted(left) and not caplog.records
    with pytest.raises(RemovedVideo):  # it was gone when the dataset was made
        list(dataset(tmp_path, ids=sorted(removed)))
    assert len(TokenCache(tmp_path).shards()) < 5


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    """What each of two ranks read."""
    folder = tmp_path_factory.mktemp("ranks")
    make_shards(folder / "cache")
    script = Path(__file__).with_name("ranks_here.py")
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = run_python(script, folder / "cache", folder, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


SHARED = ("forked", "spawned", "not prepared", "resumed")  # also where the dataset came before the ranks


@pytest.mark.slow
@pytest.mark.parametrize("how", [*SHARED, "dispatched", "sharded", "packed", "packed, forked", "packed, by index"])
def test_ranks_share_the_videos_and_a_loader_that_accelerate_prepared_fills_up_the_last_batches(told, how):
    first, second = told[0][how], told[1][how]
    assert first and second and sorted({*first, *second}) == list(range(N_VIDEOS))
    if how in SHARED:
        assert len(first) + len(second) == N_VIDEOS
    else:  # with videos of the first batches: a batch of each rank more, for each worker
        assert len(first) == len(second) and len(first) + len(second) < N_VIDEOS + 2 * 2 * 2


@pytest.mark.slow
def test_ranks_end_together_and_what_would_lose_videos_is_refused(told):
    assert len(told[0]["ddp"]) == len(told[1]["ddp"]) > 0 == len({*told[0]["ddp"]} & {*told[1]["ddp"]})
    for rank in told:
        assert rank["batches"] == -(-N_VIDEOS // 4)  # of two videos on two ranks
        assert "world_size=accelerator.num_processes, do not prepare its loader" in rank["state"]
        assert rank["stateful"] == rank["state"] and rank["end"]
        assert "DataLoaderConfiguration(dispatch_batches=False)" in rank["cut"]
        assert "leave out rank and world_size, or do not prepare the loader" in rank["given"]
