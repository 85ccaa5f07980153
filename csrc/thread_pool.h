// Threads that share the tasks of one attention call.
//
// A session is one call: the calling thread runs its body, which hands out phases of independent tasks. Helpers take
// tasks while the session lasts. A phase is over when its *tasks* are done, not when every helper has shown up.
//
// The helpers are either threads of this pool, asleep between sessions, or, if the process's torch runs on GNU OpenMP,
// the threads of that team. Torch's threads spin on the same cores after every matrix product, and a second set of
// threads would share each core with them. If the kernel deschedules a thread of this pool, that costs its share of the
// work. A borrowed thread also delays the session's end, where the whole team meets at a barrier.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace hybrid_sparse {

class ThreadPool {
 public:
  using Task = void (*)(void* context, int index);

  enum class Helpers { own, openmp };

  // num_threads counts the caller. `cpus`: one core for each helper (may be empty: not pinned); ignored with openmp.
  // Throws std::invalid_argument for num_threads < 1, std::runtime_error if openmp is asked for and not loaded, or
  // if a thread cannot be started.
  ThreadPool(int num_threads, Helpers helpers, std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Whether GNU OpenMP is loaded in this process, so that its threads can be borrowed.
  static bool openmp_is_loaded();

  int size() const { return num_threads_; }
  Helpers helpers() const { return helpers_; }

  // Runs body on the calling thread with the helpers standing by. Not reentrant; one caller at a time. An exception out of
  // body ends the session like its end does, and goes on to the caller.
  template <class Body>
  void session(Body&& body) {
    run_session([](void* context) { (*static_cast<std::remove_reference_t<Body>*>(context))(); }, &body);
  }

  // Within a session: runs task(0) … task(count - 1), in any order, on any of the threads; returns when all are done. If
  // tasks may run in parallel, one that throws ends the process.
  template <class F>
  void for_each(int count, F&& task) {
    run_phase(count, [](void* context, int index) { (*static_cast<std::remove_reference_t<F>*>(context))(index); },
              &task);
  }

 private:
  void run_session(void (*body)(void*), void* context);
  void run_phase(int count, Task task, void* context);
  bool take_one() noexcept;
  void help_until_closed();
  void own_thread(int cpu);
  void stop_own_threads();

  int num_threads_;
  Helpers helpers_;
  // The current phase: written by the session's caller, and only while next_ hands out nothing.
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> count_{0};
  alignas(64) std::atomic<uint64_t> next_{0};    // phase number << 32 | next task; kNoTask between phases
  alignas(64) std::atomic<int> done_{0};         // tasks of the phase that have finished
  alignas(64) std::atomic<uint32_t> opened_{0};  // sessions opened; own threads sleep on it
  std::atomic<uint32_t> closed_{0};              // sessions closed
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  std::vector<std::thread> threads_;
};

}  // namespace hybrid_sparse
