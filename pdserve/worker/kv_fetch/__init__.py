"""Fetches KV blocks from other workers' pools, on the node's side, and serves them."""
