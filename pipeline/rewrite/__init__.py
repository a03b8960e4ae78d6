"""Commands that move stored tokens or write them again, without reading a video: one file per command."""
