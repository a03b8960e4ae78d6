"""What the videos table of a large cache takes to open, to search, to resume from and to merge."""
