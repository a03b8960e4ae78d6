"""Workers of a local Ray that are forked from one process, which has imported their modules."""
