"""The engine port, the scheduler and the engine core: everything about engines but the compute."""
