"""Measure this package on this machine: what is measured lives here, beside the command that shows it."""
