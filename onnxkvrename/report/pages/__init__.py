"""Pages for a browser: self-contained files, without a network."""
