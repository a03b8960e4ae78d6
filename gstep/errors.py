"""Errors of the method and the models."""

import re

# Messages of cuBLAS, cuDNN, CUDA and Triton when memory runs out, which come in errors of no special type.
_NO_MEMORY = re.compile(
    r"_STATUS_\w*ALLOC(ATION)?_FAILED|\bCUDA( driver)? error: out of memory|\bTriton Error \[CUDA\]: out of memory"
)


class ModelError(ValueError):
    """A model that cannot be used: unknown type, no safetensors, missing keys; the message names the remedy."""


class MissingEvidence(ValueError):  # noqa: N818 - the public contract's name
    """A pruning method lacks evidence that it needs; the message names the evidence."""


class UnsupportedVideo(ValueError):  # noqa: N818 - beside the pipeline's VideoFault, which it becomes
    """A video of a shape that the model does not take; the message names the shape."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` reports that GPU memory ran out, so that a smaller batch may succeed."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch is not imported for its OutOfMemoryError
    return "OutOfMemoryError" in kinds or _NO_MEMORY.search(str(error)) is not None


def is_gpu_broken() -> bool:
    """Synchronise with this process's GPU; return True if that raises, since every later kernel would fail too.

    Call it only in a process that has a CUDA context: it would create a context otherwise.
    """
    import torch  # noqa: PLC0415 - loaded already, since the context exists

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - of any type: the next kernel would raise it too
        return True
    return False


class TooFewFrames(UnsupportedVideo):
    """A video of fewer sampled frames than the model takes; the message has the minimum."""


class WrongSelection(RuntimeError):  # noqa: N818 - as above
    """A pruning method returned an invalid selection; the message names the method."""
