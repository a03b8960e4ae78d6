"""Workers of a local Ray, forked from one process that has imported their modules."""
