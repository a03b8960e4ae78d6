"""Errors of the method and the models."""


class ModelError(ValueError):
    """A model that cannot be used: unknown type, no safetensors, missing keys; the message names the remedy."""


class MissingEvidence(ValueError):  # noqa: N818 - the public contract's name
    """A pruning method was given no evidence that it needs; the message names what is missing."""


class UnsupportedVideo(ValueError):  # noqa: N818 - beside the pipeline's VideoFault, which it becomes
    """A video of a shape that the model does not take; the message says which."""


class TooFewFrames(UnsupportedVideo):
    """A video of fewer sampled frames than the model takes; the message says how many it needs."""
