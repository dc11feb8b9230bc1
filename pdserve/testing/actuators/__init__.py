"""What tests need of the planner's actuators: a conformance suite, and a fake with faults."""
