"""Reads checkpoints: a model's configuration and weights."""
