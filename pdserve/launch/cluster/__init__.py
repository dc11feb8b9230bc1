"""Connects a process to its cluster: addresses, node, membership log, admin requests."""
