"""The parts of `bench/policies.py`: worlds and arms, running them, comparing, telling."""
