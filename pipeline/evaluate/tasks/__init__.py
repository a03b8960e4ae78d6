"""Tasks of lmms-eval: which ones there are, their documents as questions, and their own rules for replies."""
