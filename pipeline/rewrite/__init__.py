"""Stored tokens that move or are written again, without a video: a file for each command.

``compact`` and ``remove`` change a cache; ``merge``, ``recode`` and ``reprune`` make one of others.
"""
