"""A cache as datasets of torch: by index, or shard by shard over ranks and workers; and batches without padding."""
