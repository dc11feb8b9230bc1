"""Simulates whole clusters in virtual time from one seed (docs/simulation.md)."""
