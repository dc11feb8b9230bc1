"""What `bench/router.py` measures: a desk alone, and a router behind its bus."""
