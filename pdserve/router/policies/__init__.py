"""Routing policies: each chooses a worker among the eligible ones. One file per policy, loaded by
name.
"""
