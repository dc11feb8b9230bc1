"""Replays a trace on a virtual cluster of production code, with a timing model as engine."""
