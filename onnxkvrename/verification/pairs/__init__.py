"""Find the states of a model by its dataflow, and write rules for them."""
