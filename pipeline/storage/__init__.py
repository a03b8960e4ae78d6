"""Read and write whole files below a root, in a local folder or an object store."""
