"""Results as text, tables, JSON and pictures; strings out."""
