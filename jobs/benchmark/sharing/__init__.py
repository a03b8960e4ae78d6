"""What merging two large caches and comparing them take."""
