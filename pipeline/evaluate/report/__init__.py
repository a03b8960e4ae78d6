"""The report page: results as people would rather see them, in one file without network."""
