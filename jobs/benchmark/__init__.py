"""Measurements of this package on this machine, a module for each, and the command that runs them."""
