"""Metrics, logs, probes and loop lag."""
