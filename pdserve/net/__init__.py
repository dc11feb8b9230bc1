"""Links between nodes over byte transports: TCP, and an in-memory network with faults."""
