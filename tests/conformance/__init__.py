"""Our engine and relay beside real vLLM: `make conformance`."""
