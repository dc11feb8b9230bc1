"""Moves a request from one worker to another, without a lost token."""
