"""The cache's format: how it is written and read, and which of a video's rows counts."""
