// AVX-512 with the bfloat16 dot product.
#define PDSERVE_SET avx512_bf16
#define PDSERVE_LANES 16
#define PDSERVE_ROWS 14
#define PDSERVE_DOT2 1
#include "kernels_impl.hpp"
