"""Measures machines: for operators (`probe`), and before the first plans (`first_rates`)."""
