"""How fast tokens are read from a cache."""
