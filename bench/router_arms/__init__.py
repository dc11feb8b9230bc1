"""The arms of `bench/router.py`: a router core alone, and a router behind its bus."""
