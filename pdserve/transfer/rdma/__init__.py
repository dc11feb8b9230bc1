"""RDMA writes through pyverbs, where the system has it; importing this package does not need it.

pyverbs_loader   finds pyverbs, and says why it cannot be used
ibverbs_ffi      the C objects behind pyverbs' objects
adapter          one adapter: its port, registered pools, queue pairs
adapters         the adapters of this machine, with an engine's pools registered once
device_memory    whether a pool in GPU memory can be registered
negotiate        GID, MTU, which adapter takes which rail      pure
imm_data         the 32 bits of a notification                 pure
work_requests    work requests as C structures                 pure, with a native twin
send_queue       what waits, is posted, has completed          pure
rail             one queue pair on the event loop
verbs_path       a path over several rails
transport        the paths of one life of a node
"""
