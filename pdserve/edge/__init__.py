"""Bounds what untrusted clients can cost on every port that speaks HTTP."""
