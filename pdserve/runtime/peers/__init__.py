"""How the parts of nodes talk to each other: actors that serve, and references to nodes."""
