"""What others see of a run: reports of workers, their load, metrics at Ray's port, and what the dying said."""
