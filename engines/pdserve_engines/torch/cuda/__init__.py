"""Kernels in Triton for the steps of a model on an NVIDIA GPU, and the model that launches them.

The executor imports `kernel_model` only for a GPU: importing Triton takes a second.
"""
