"""What transfers need of CUDA: a few calls of its driver, and kernels compiled where they run."""
