// A few threads that compute one thing together, many short stages after each other.
//
// Stages of a decode step take microseconds, so members wait for each other by spinning; between
// jobs they spin briefly and then sleep. One job at a time; the caller is member 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pdserve::cpu {

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs `work(member)` on every member and returns when all are done. `work` must not throw, and
  // every member must pass the same stages.
  void run(const std::function<void(int)>& work);

  // One stage, called by every member: `body(begin, end)` for pieces of [0, total), at most `grain`
  // long; the next free member takes the next piece. Returns when the whole stage is done.
  template <class Body>
  void stage(int total, int grain, const Body& body) {
    for (;;) {
      const int begin = next_.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= total) break;
      body(begin, begin + grain < total ? begin + grain : total);
    }
    wait_for_all();
  }

 private:
  void wait_for_all();
  void serve(int member);
  bool await_job(unsigned seen);
  void stop();

  const int size_;
  // Apart from each other, because every member writes them at the same moment.
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> stage_{0};
  alignas(64) std::atomic<unsigned> job_{0};
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace pdserve::cpu
