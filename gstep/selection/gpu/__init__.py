"""The selection on a GPU, in Triton kernels; only ``launch`` can be imported where Triton is not installed."""
