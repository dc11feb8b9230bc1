"""The parts of `bench/policies.py`: worlds and arms, runner, comparison, report."""
