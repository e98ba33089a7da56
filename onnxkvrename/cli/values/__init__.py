"""Values of options that are texts with a form of their own."""
