"""Composes each role as a part of a process, one file per role.

This package imports no role, so a process loads only its own: a router needs no HTTP server and no
tokenizer, and starts in half the time and memory without them.
"""
