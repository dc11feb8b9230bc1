"""Transfers KV between the pools of engine cores: connector, receiver, sender, paths to peers."""
