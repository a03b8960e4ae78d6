"""How long a run takes to find out what is left of millions of videos."""
