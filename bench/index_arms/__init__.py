"""The trees that bench/index.py compares, each measured in a process of its own."""
