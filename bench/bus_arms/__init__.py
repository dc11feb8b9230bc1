"""What `bench/bus.py` compares: one file per way of talking between two processes."""
