"""lmms-eval asks, and gets its replies from cached tokens: its model ``gstep_cached``.

No other room imports lmms_eval, and of this one only ``manifest`` and ``plugin`` do.
"""
