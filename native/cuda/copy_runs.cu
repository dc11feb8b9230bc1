// Many short runs of bytes in one launch, where one copy command each would cost more than the bytes.
// Launched by pdserve/transfer/cuda/driver.py with one thread block per run, or fewer that take turns.
//
// Twin: pdserve/transfer/copying.py's copy_pure. `to` and `from` are addresses.

namespace {

// Whole words where both ends allow it, and the rest byte by byte.
template <typename Word>
__device__ long long copy_words(unsigned char* to, const unsigned char* from, long long length) {
  const long long words = length / static_cast<long long>(sizeof(Word));
  auto* there = reinterpret_cast<Word*>(to);
  const auto* here = reinterpret_cast<const Word*>(from);
  for (long long word = threadIdx.x; word < words; word += blockDim.x) there[word] = here[word];
  return words * static_cast<long long>(sizeof(Word));
}

}  // namespace

extern "C" __global__ void pdserve_copy_runs(const long long* to, const long long* from,
                                             const long long* lengths, unsigned count) {
  for (unsigned run = blockIdx.x; run < count; run += gridDim.x) {
    auto* there = reinterpret_cast<unsigned char*>(to[run]);
    const auto* here = reinterpret_cast<const unsigned char*>(from[run]);
    const long long length = lengths[run];
    const long long bits = to[run] | from[run];
    long long done = 0;
    if (bits % 16 == 0)
      done = copy_words<uint4>(there, here, length);
    else if (bits % 4 == 0)
      done = copy_words<unsigned>(there, here, length);
    copy_words<unsigned char>(there + done, here + done, length - done);
  }
}
