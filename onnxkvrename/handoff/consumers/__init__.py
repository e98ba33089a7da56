"""One file for each consumer."""
