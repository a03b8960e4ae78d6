"""Errors of the method and the models."""

import re

# What cuBLAS and cuDNN, and what CUDA and Triton say in plain errors where they find no memory.
_NO_MEMORY = re.compile(
    r"_STATUS_\w*ALLOC(ATION)?_FAILED|\bCUDA( driver)? error: out of memory|\bTriton Error \[CUDA\]: out of memory"
)


class ModelError(ValueError):
    """A model that cannot be used: unknown type, no safetensors, missing keys; the message names the remedy."""


class MissingEvidence(ValueError):  # noqa: N818 - the public contract's name
    """A pruning method was given no evidence that it needs; the message names what is missing."""


class UnsupportedVideo(ValueError):  # noqa: N818 - beside the pipeline's VideoFault, which it becomes
    """A video of a shape that the model does not take; the message says which."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that a GPU's memory did not suffice, so that less work at once may succeed."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch is not imported for its OutOfMemoryError
    return "OutOfMemoryError" in kinds or _NO_MEMORY.search(str(error)) is not None


def gpu_refuses_work() -> bool:
    """Ask the GPU of this process's CUDA context, which there must be, and return True where it fails."""
    import torch  # noqa: PLC0415 - whoever has such a context has imported it

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - whatever it is, the next kernel would raise it too
        return True
    return False


class TooFewFrames(UnsupportedVideo):
    """A video of fewer sampled frames than the model takes; the message says how many it needs."""


class WrongSelection(RuntimeError):  # noqa: N818 - as above
    """A pruning method returned something else than a selection of its tokens; the message names the method."""
