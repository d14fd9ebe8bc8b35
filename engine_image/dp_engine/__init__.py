"""CPU stand-in for vLLM's data-parallel engine: same command line, processes and wire, no model."""
