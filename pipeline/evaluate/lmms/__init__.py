"""lmms-eval asks, and gets its replies from cached tokens: its model ``gstep_cached``.

No other package imports lmms_eval, and of this one only ``manifest`` and ``plugin`` do.
"""
