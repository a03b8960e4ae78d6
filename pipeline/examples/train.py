"""Train on a cache without a video: a linear probe that tells from a token how far into its video it is.

Run it by ``python pipeline/examples/train.py CACHE``; a real probe would predict your labels.

To resume within an epoch, take IterableTokenDataset and save its ``state_dict()``, or with workers that of torchdata's
StatefulDataLoader. Under Accelerate give the dataset ``rank=accelerator.process_index`` and
``world_size=accelerator.num_processes``, and prepare the model and the optimizer, not the loader.
"""

import sys

import torch
from torch.utils.data import DataLoader

import pipeline

torch.manual_seed(0)
data = pipeline.TokenDataset(sys.argv[1], retention_ratio=0.10)  # IterableTokenDataset for millions of videos
loader = DataLoader(data, batch_size=2, shuffle=True, collate_fn=pipeline.pack)  # rows of tokens, without padding
probe = torch.nn.Linear(data[0].tokens.shape[1], 1)
optimizer = torch.optim.Adam(probe.parameters(), lr=0.01)
for epoch in range(20):
    losses = []
    for batch in loader:
        place = batch.frame / max(1, int(batch.frame.max()))  # 0: the first frame, 1: the last one
        loss = torch.nn.functional.mse_loss(probe(batch.tokens.float()).squeeze(1), place)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: mean squared error {sum(losses) / len(losses):.3f}")
