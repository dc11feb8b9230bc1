"""Publish and subscribe without a broker: latest values, and logs without gaps.

`docs/topics.md` explains the design. Nothing here knows what is published.
"""
