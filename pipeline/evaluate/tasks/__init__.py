"""Tasks of lmms-eval: the list of tasks, their documents as questions, and scoring by their own rules."""
