#include "pdserve/cpu/team.hpp"

namespace pdserve::cpu {
namespace {

// Turns of about 10 ns each. A stage's stragglers are waited for a while longer than a job, because
// a thread that sleeps costs its wake-up in every one of a hundred stages; after that the processor
// is offered to the thread that keeps the straggler from running.
constexpr int kStageTurns = 4000;
constexpr int kJobTurns = 10000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int threads) : size_(threads < 1 ? 1 : threads) {
  try {
    for (int member = 1; member < size_; ++member)
      threads_.emplace_back([this, member] { serve(member); });
  } catch (...) {  // the system has no more threads to give
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
    job_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& work) {
  work_ = &work;
  if (size_ > 1) {
    {
      // The lock pairs with `await_job`: a member either sees the new job or is already waiting.
      const std::lock_guard<std::mutex> lock(mutex_);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  work(0);
  wait_for_all();  // no member uses `work` after this
}

void Team::serve(int member) {
  unsigned seen = 0;
  while (await_job(seen)) {
    ++seen;
    (*work_)(member);
    wait_for_all();
  }
}

bool Team::await_job(unsigned seen) {
  for (int turn = 0; turn < kJobTurns; ++turn) {
    if (job_.load(std::memory_order_acquire) != seen) return !stopping_.load();
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [&] { return job_.load(std::memory_order_acquire) != seen; });
  return !stopping_.load();
}

void Team::wait_for_all() {
  const unsigned stage = stage_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    // The last member: all have arrived, so none takes from `next_` any more.
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    stage_.store(stage + 1, std::memory_order_release);
    return;
  }
  for (int turn = 0; stage_.load(std::memory_order_acquire) == stage; ++turn) {
    if (turn < kStageTurns)
      relax();
    else
      std::this_thread::yield();
  }
}

}  // namespace pdserve::cpu
