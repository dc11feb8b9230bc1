"""The wire protocol between nodes, sans-I/O."""
