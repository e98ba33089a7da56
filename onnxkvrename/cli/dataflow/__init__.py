"""Commands that know a model's buffers by its dataflow, without rules."""
