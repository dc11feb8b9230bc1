"""Renders chat messages into a prompt with the model's chat template, in a sandbox."""
