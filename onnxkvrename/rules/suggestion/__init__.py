"""Rules that recognise pairs which are known already, such as those of the dataflow."""
