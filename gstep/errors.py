"""The errors of the pruning methods and the models, and checks for a GPU that is out of memory or broken."""

import re

# Messages of cuBLAS, cuDNN, CUDA and Triton when memory runs out. Their errors have no special type.
_NO_MEMORY = re.compile(
    r"_STATUS_\w*ALLOC(ATION)?_FAILED|\bCUDA( driver)? error: out of memory|\bTriton Error \[CUDA\]: out of memory"
)


class ModelError(ValueError):
    """A model cannot be used, for example because its type is unknown or tensors are missing."""


class MissingEvidence(ValueError):  # noqa: N818 - the public contract's name
    """A pruning method needs evidence that it was not given."""


class UnsupportedVideo(ValueError):  # noqa: N818 - beside the pipeline's VideoFault, which it becomes
    """The model does not accept a video of this shape."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` reports that GPU memory ran out, so that a smaller batch may succeed.

    This is the case if its class or a base class is named OutOfMemoryError, as torch's is, or by a message of cuBLAS,
    cuDNN, CUDA or Triton. Chained errors are not inspected.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch is not imported for its OutOfMemoryError
    return "OutOfMemoryError" in kinds or _NO_MEMORY.search(str(error)) is not None


def is_gpu_broken() -> bool:
    """Return True if synchronizing with this process's GPU raises an error, so that every later kernel would fail too.

    Call it only in a process that has a CUDA context, because it would create one otherwise.
    """
    import torch  # noqa: PLC0415 - loaded already, since the context exists

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - whatever its type, the next kernel would raise it too
        return True
    return False


class TooFewFrames(UnsupportedVideo):
    """The video has fewer sampled frames than the model needs."""


class WrongSelection(RuntimeError):  # noqa: N818 - as above
    """A pruning method returned an invalid selection, which is a bug in the method."""
