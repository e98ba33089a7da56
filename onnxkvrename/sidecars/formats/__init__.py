"""One file for each format of sidecar, with a ``FORMAT`` in it; adding a file adds a format."""
