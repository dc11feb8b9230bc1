"""The KV data plane: what moves blocks from one worker's pool into another's."""
