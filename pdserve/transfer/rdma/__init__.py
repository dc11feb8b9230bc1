"""RDMA writes through pyverbs, where the system has it; importing this needs none of it.

library          where pyverbs is, and whether it can be used
native_objects   the C objects behind pyverbs' ones
adapter          one adapter: its port, registered pools, queue pairs
negotiate        GID, MTU, who takes which rail                             pure
table            work requests as C structures                              pure, native twin
queue            what waits, is under way, has completed                    pure
rail             one queue pair on the loop
transport        adapters, paths, the end
"""

from __future__ import annotations

from pdserve.transfer.rdma.adapter import Options
from pdserve.transfer.rdma.library import available
from pdserve.transfer.rdma.transport import RdmaTransport

__all__ = ["Options", "RdmaTransport", "available"]
