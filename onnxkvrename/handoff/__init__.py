"""Consumers of KV buffers, and prefill against decode."""
