"""Commands in hints: what the user typed, and what is suggested on top of it."""
