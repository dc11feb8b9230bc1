"""The arms of `bench/bus.py`: one file per kind of bus between two processes."""
