"""Moves KV over TCP."""
