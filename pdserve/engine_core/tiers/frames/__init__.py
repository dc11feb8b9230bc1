"""Exchanges blocks with other workers by frames of the host tier.

For engines whose device pool no transport can reach: peers read and write host frames, and the
engine's own copies join those with its device.
"""
