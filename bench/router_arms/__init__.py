"""What `bench/router.py` measures: a router core alone, and a router behind its bus."""
