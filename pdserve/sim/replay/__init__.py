"""A trace through a virtual cluster of production code, timed by a model instead of an engine."""
