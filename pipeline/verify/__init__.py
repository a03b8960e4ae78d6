"""Check that every file of a cache holds what was committed, find what interrupted runs left, and repair on request."""
