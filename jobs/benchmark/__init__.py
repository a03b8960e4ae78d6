"""Measurements of this package on this machine, one module each, and the command that runs them."""
