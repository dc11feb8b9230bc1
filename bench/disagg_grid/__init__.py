"""Parts of bench/disagg.py."""
