"""How many questions a second are answered from a cache and from videos."""
