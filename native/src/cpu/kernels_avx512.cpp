// AVX-512 F, BW, DQ and VL.
#define PDSERVE_SET avx512
#define PDSERVE_LANES 16
#define PDSERVE_ROWS 14
#define PDSERVE_DOT2 0
#include "kernels_impl.hpp"
