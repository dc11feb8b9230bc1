"""KV over TCP."""
