"""The model ``gstep_cached`` of lmms-eval, which answers from cached tokens.

Only ``manifest`` and ``plugin`` import lmms_eval.
"""
