"""The Ray cluster that a run uses: its address, connection, head, nodes and disks."""
