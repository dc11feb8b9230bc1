"""Manages the KV cache's blocks: reference counts, prefix cache, memory and layouts."""
