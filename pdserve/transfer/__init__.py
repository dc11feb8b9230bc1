"""Moves KV blocks from one worker's pool into another's."""
