"""Cluster membership by gossip. `core` is pure; `service` drives it on real links."""
