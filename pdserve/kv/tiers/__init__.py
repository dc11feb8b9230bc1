"""Tiers of KV below the device: host memory and disk."""
