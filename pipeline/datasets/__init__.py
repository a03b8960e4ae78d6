"""A cache as datasets of torch: by place, or shard by shard over ranks and workers; and batches without padding."""
