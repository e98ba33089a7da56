"""One file for each format of sidecar."""
