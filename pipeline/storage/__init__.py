"""Whole files under a root, in a folder or an object store, and who may write there."""
