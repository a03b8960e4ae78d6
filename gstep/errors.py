"""Errors of the method and the models."""


class ModelError(ValueError):
    """A model that cannot be used: unknown type, no safetensors, missing keys; the message names the remedy."""


class MissingEvidence(ValueError):  # noqa: N818 - the public contract's name
    """A pruning method was given no evidence that it needs; the message names what lacks."""
