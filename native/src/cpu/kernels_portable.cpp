// Whatever the compiler makes of vectors of four floats: SSE2, NEON, or plain code.
#define PDSERVE_SET portable
#define PDSERVE_LANES 4
#define PDSERVE_ROWS 6
#define PDSERVE_DOT2 0
#include "kernels_impl.hpp"
