"""Patterns for whole names, matched in linear time."""
