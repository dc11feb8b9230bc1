"""What `probe.py` asks a GPU: one file for each kind of question."""
