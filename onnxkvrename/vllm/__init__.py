"""Project a layout onto vLLM: specs, groups, memory and transfers, one module for each step."""
