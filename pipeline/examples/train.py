"""Train on a cache without a video: a linear probe that tells from a token how far into its video it is.

Run it by ``python pipeline/examples/train.py CACHE CHECKPOINT``; a real probe would predict your labels. The same
command resumes behind the last saved batch. Two worker processes read, so their positions come from torchdata's
StatefulDataLoader (``pip install -e '.[train]'``).

Under Accelerate give the dataset ``rank=accelerator.process_index`` and ``world_size=accelerator.num_processes``,
prepare the model and the optimizer but not the loader, and move each batch by ``batch.to(accelerator.device)``.
"""

import sys
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import pipeline

EPOCHS, BATCHES_PER_SAVE = 20, 4
cache, checkpoint = pipeline.TokenCache(sys.argv[1]), Path(sys.argv[2])

torch.manual_seed(0)
data = pipeline.IterableTokenDataset(cache, retention_ratio=0.10, shuffle=True)
loader = StatefulDataLoader(data, batch_size=2, num_workers=2, persistent_workers=True, collate_fn=pipeline.pack)
probe = torch.nn.Linear(*cache.hidden_sizes, 1)
optimizer = torch.optim.Adam(probe.parameters(), lr=0.01)
parts = {"probe": probe, "optimizer": optimizer, "loader": loader}
first_epoch, losses = 0, []


def save(epoch: int, losses: list[float]) -> None:
    """Write the checkpoint at another name first, so that a kill leaves the one before."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, "losses": losses, **states}, checkpoint.with_suffix(".new"))
    checkpoint.with_suffix(".new").replace(checkpoint)


if checkpoint.exists():
    saved = torch.load(checkpoint)
    first_epoch, losses = saved["epoch"], saved["losses"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])
for epoch in range(first_epoch, EPOCHS):
    data.set_epoch(epoch)  # another order; of the epoch that was saved, it keeps the position
    for batch in loader:  # rows of tokens, without padding
        last = torch.tensor([max(1, row["n_frames"] - 1) for row in batch.metadata])  # frame of each video
        place = batch.frame / last.repeat_interleave(batch.cu_seqlens.diff())  # 0: the first frame, 1: the last one
        loss = torch.nn.functional.mse_loss(probe(batch.tokens.float()).squeeze(1), place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % BATCHES_PER_SAVE == 0:
            save(epoch, losses)
    save(epoch + 1, [])
    print(f"epoch {epoch}: mean squared error {sum(losses) / len(losses):.6f}")
    losses = []
