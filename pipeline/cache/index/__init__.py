"""The compacted index, derived from the videos shards: made under the lock, and asked by readers and runs."""
