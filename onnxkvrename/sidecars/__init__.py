"""Text files that repeat the names of KV buffers."""
