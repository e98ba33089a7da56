"""Which names are KV, what they pair with, what they become, and what would be wrong."""
