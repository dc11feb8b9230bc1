"""Implements the forward passes of the model families."""
