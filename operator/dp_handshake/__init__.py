"""Handshake relay, its monitor, and the launcher of the engine containers."""
