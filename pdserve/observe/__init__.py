"""Metrics, logs and loop lag: one place for every name."""
