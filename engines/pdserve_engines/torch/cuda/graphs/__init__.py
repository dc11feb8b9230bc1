"""CUDA graphs for steps that only decode: captured while the engine loads, replayed in service.

`decode_graphs` is the whole story; the other files are its sizes, its inputs and its device. Only
`static_inputs` needs Triton.
"""
