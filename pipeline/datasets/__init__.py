"""PyTorch datasets over a cache (by index, or shard by shard across ranks and workers), and batches without padding."""
