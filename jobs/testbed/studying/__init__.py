"""Whether answers come from where the answer is seen: what a study asks, counts and writes."""
