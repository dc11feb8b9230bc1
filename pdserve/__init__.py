"""pdserve: large language models over the OpenAI API, on one laptop or on a cluster.

Holds the version and nothing else: importing `pdserve` must stay cheap, because every role, every
sub-command and every spawned process pays for it.
"""

__all__ = ["__version__"]

__version__ = "0.3.0.dev0"
