"""Token ids to block hashes: the content names under which KV is stored, found and moved."""
