"""What vLLM makes of a layout: specs, groups, memory, transfers."""
