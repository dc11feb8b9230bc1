"""Blocks of one engine core that come from lower tiers and from other workers."""
