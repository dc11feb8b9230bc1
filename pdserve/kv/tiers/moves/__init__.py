"""Moves blocks between tiers: one file for each direction, and what they share.

    storing   device -> host          spilling  host -> disk
    fetching  host -> device          fills     disk -> host
    arrivals  another worker -> host
    sharing   what other workers have below the same directory

Each decides and submits jobs; `LowerTiers` owns them and brings them the ends of their jobs.
"""
