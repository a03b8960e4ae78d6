"""The frame that all commands share: flags from dataclasses, and results as JSON."""
