"""Rules that recognise and pair KV names, plan their new names, and check the result."""
