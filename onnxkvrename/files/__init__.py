"""Bytes on disk: read, copy, temporary files, locks, transactions. Nothing else writes."""
