"""What `inspect` shows of a model, for a terminal and for pages."""
