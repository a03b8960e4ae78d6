"""From scores to tables: means, their errors, and the paper's layout. Numbers in, text out; no files."""
