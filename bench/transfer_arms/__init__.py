"""The arms of `bench/transfer.py`: each moves lists of blocks from one process to another."""
