"""The trees that `bench/index.py` compares, each measured in its own process."""
