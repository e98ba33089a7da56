"""The states of a model by its dataflow alone, whatever their names are."""
