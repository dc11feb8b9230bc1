"""The planner role: as many workers as needed, in the right modes."""
