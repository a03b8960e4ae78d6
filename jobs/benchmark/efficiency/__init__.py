"""What an answer costs with each method, from the video and from a cache: the paper's Table 3."""
