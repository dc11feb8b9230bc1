"""Publish and subscribe without a broker: values that replace each other, and logs without gaps.

`docs/topics.md` tells the whole of it. Nothing here knows what is published.
"""
