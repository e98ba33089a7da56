"""Bytes on disk: found, read, and replaced all or none. Nothing else writes."""
