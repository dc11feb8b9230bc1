"""Byte transports under links: TCP with optional TLS, and an in-memory network."""
