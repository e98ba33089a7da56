"""Proofs that each buffer is retained."""
