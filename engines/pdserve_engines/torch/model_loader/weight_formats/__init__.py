"""Reads quantised weights, one file for each format; `base` says which formats there are."""
