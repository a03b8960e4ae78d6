"""How long GSTEP selects, beside the loop of the paper."""
