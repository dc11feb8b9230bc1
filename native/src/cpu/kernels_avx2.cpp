// AVX2 with FMA.
#define PDSERVE_SET avx2
#define PDSERVE_LANES 8
#define PDSERVE_ROWS 6
#define PDSERVE_DOT2 0
#include "kernels_impl.hpp"
