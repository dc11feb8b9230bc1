"""Hashes blocks of tokens: the content hashes under which KV is stored, found and moved."""
