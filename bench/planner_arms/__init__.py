"""Parts of bench/planner.py."""
