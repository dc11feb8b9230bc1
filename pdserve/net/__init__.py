"""Links between nodes over byte transports: TCP, and memory with faults."""
