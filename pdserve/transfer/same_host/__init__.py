"""KV between processes of one host: shared memory and CUDA IPC."""
