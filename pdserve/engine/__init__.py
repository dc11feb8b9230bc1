"""The node's side of an engine: the port, the client of the core process, and its supervision."""
