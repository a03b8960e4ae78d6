"""The family ``generic``: any video model of transformers, encoded and answered by the model's own code."""
