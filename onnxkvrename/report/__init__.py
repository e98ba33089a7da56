"""Results as text, tables, JSON and pages; strings out."""
