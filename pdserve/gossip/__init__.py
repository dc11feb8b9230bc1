"""Membership: who is in the cluster, in which life, saying what. Pure: no sockets, no tasks."""
