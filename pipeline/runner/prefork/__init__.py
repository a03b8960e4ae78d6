"""Workers of a Ray that is started here, forked from one process that has imported what they use."""
