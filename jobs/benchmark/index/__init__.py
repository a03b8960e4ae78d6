"""How long opening, finding and resuming take with a compacted index."""
