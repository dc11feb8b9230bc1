"""What `bench/transfer.py` compares: each moves lists of blocks from one process to another."""
