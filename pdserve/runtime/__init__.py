"""The base of every node: links, members, topics, tasks and supervision."""
