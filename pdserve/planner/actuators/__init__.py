"""Starts and stops workers: one file per way to do it, behind the port in `base`."""
