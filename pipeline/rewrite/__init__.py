"""Commands that move stored tokens or write them again, without reading a video: one file per command.

``compact`` and ``remove`` change a cache in place; ``merge``, ``recode`` and ``reprune`` make a new cache from others.
"""
