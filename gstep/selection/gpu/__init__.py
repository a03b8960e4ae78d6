"""The selection on a GPU, in Triton kernels; without Triton, only ``launch`` can be imported."""
