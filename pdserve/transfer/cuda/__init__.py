"""Wraps the CUDA driver calls that transfers need, and kernels compiled at run time."""
