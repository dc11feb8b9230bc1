"""The worker role: a node with an engine."""
