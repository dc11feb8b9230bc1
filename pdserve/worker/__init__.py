"""The worker role: a cluster node that runs one inference engine."""
