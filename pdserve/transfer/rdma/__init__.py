"""RDMA writes through pyverbs, where the system has it; importing this needs none of it.

library          where pyverbs is, and whether it can be used
native_objects   the C objects behind pyverbs' ones
adapter          one adapter: its port, registered pools, queue pairs
adapters         those of this machine, with an engine's pools registered once
device_memory    whether a pool of a GPU can be registered
negotiate        GID, MTU, who takes which rail                             pure
table            work requests as C structures                              pure, native twin
queue            what waits, is under way, has completed                    pure
rail             one queue pair on the loop
transport        one life's paths, the end
"""
