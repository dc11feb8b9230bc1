"""Tensor parallel: several processes, the ranks, compute one model.

Rank 0 is the engine core's own process: it schedules, samples and serves. The others are its
children and only compute. Read `rank_model.py` first, then `leader.py` and `rank.py`.
"""
