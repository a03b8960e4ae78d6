"""What a cache shows of itself: a summary, one video's kept tokens, and how far a run has come."""
