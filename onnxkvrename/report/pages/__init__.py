"""Pages and pictures for a browser: self-contained files, without a network."""
