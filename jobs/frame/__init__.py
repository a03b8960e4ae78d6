"""What all commands share: their flags, made of dataclasses, and their results as JSON."""
