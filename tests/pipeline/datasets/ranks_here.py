"""A training of two ranks by the launcher of torchrun: it writes what each rank read, and what it was refused."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pipeline import IterableTokenDataset, TokenCache, TokenDataset, pack


def numbers_of(videos) -> torch.Tensor:
    """Return a batch that Accelerate can send: the numbers in the ids, as v07."""
    return torch.tensor([int(video.video_id[1:]) for video in videos])


def read(loader) -> list[int]:
    return [int(number) for batch in loader for number in batch]


def read_packed(folder: str, loader) -> list[int]:
    """Return the numbers of the videos of packed batches, whose tensors are compared with the cache."""
    cache, numbers = TokenCache(folder), []
    for batch in loader:
        videos = cache.get_many(batch.video_ids)
        expected = pack(videos)
        assert [*batch] == [*expected] and batch.metadata == expected.metadata
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
        assert torch.equal(batch.cu_seqlens, expected.cu_seqlens) and len(batch.cu_seqlens) == len(videos) + 1
        numbers += [int(video.video_id[1:]) for video in videos]
    return numbers


def packed(data, workers: int = 0) -> DataLoader:
    return DataLoader(data, 2, num_workers=workers, collate_fn=pack)


def loader_of(data, workers: int = 0, context: str | None = None) -> DataLoader:
    return DataLoader(data, 2, num_workers=workers, collate_fn=numbers_of, multiprocessing_context=context)


def refused(call) -> str:
    """Return the error of a call, without which it fails."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def train_by_ddp(folder: str) -> list[int]:
    """Train an epoch with gradients that all ranks wait for: it hangs where one has more batches than another."""
    model, steps = DistributedDataParallel(torch.nn.Linear(16, 1)), []
    for batch in DataLoader(IterableTokenDataset(folder, shuffle=True, even=True), batch_size=2, collate_fn=pack):
        model(batch.tokens.float()).mean().backward()
        steps += [int(name[1:]) for name in batch.video_ids]
    return steps


def main(folder: str, out: str) -> None:
    # Workers that are spawned import this file, and need none of these.
    from accelerate import Accelerator, DataLoaderConfiguration  # noqa: PLC0415
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415

    early = IterableTokenDataset(folder)  # before there are ranks
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    told = {
        "forked": read(loader_of(early, 2)),
        "spawned": read(loader_of(early, 1, context="spawn")),
        "ddp": train_by_ddp(folder),
    }
    accelerator = Accelerator(cpu=True)
    sharding = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    data = IterableTokenDataset(folder, shuffle=True)
    prepared = accelerator.prepare(loader_of(data))
    told["batches"] = len(prepared)
    told["dispatched"] = []
    for batch in prepared:
        told["dispatched"] += batch.tolist()
        if not prepared.end_of_dataloader:
            told["state"] = refused(data.state_dict)
    told["end"] = data.state_dict()["finished"]
    stateful = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    told["stateful"] = refused(lambda: stateful.prepare(loader_of(data)))
    told["sharded"] = read(sharding.prepare(loader_of(data)))
    told["packed"] = read_packed(folder, accelerator.prepare(packed(data)))
    told["packed, forked"] = read_packed(folder, accelerator.prepare(packed(data, 2)))
    told["packed, by index"] = read_packed(folder, accelerator.prepare(packed(TokenDataset(folder))))
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    told["cut"] = refused(lambda: next(iter(dispatching.prepare(packed(TokenDataset(folder))))))
    told["not prepared"] = read(loader_of(data))
    given = IterableTokenDataset(folder, rank=accelerator.process_index, world_size=accelerator.num_processes)
    told["given"] = refused(lambda: read(accelerator.prepare(loader_of(given))))
    loader = StatefulDataLoader(given, batch_size=2, num_workers=2, collate_fn=numbers_of)
    batches = iter(loader)
    first = [int(number) for _ in range(2) for number in next(batches)]
    resumed = StatefulDataLoader(given, batch_size=2, num_workers=2, collate_fn=numbers_of)
    resumed.load_state_dict(loader.state_dict())
    del batches
    told["resumed"] = first + read(resumed)
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def launch(*arguments: str) -> None:
    """Run ``main`` on two ranks as ``torchrun --standalone`` does, but forked from this process, with its imports."""
    import accelerate  # noqa: F401, PLC0415
    import torchdata.stateful_dataloader  # noqa: F401, PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "ranks"}
    config = LaunchConfig(1, 1, nproc_per_node=2, start_method="fork", **rendezvous)
    elastic_launch(config, main)(*arguments)


if __name__ == "__main__":
    launch(*sys.argv[1:])
