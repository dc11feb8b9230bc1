"""Fetches KV blocks from other workers' pools, and serves them to other workers."""
