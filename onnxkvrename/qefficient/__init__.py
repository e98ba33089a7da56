"""QEfficient's export cache."""
