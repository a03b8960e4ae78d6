"""How long every pruning method takes beside GSTEP."""
