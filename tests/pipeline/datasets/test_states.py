"""States of an epoch: its end begins the next one, set_epoch begins another, and none is given that is not known."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeline import IterableTokenDataset, TokenCache, TokenDataset, pack
from pipeline.errors import RemovedVideo
from pipeline.rewrite.compact import join_tokens
from pipeline.rewrite.remove import remove_videos
from tests.pipeline.datasets.caches import IDS, dataset, ids_of, make_shards

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
