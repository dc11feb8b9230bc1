"""Changes a worker's mode while it serves."""
