"""The parts of `bench/peers/dynamo.py`: arms, load, profiles, page."""
