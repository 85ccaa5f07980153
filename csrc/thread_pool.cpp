#include "thread_pool.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>

namespace hybrid_sparse {
namespace {

// After a session, a thread of the pool waits this many pauses (some 50 us on a Zen 4) for the next one before it sleeps.
constexpr int kSpinsBeforeSleep = 2000;

// Index part of `next_` between phases: above every count.
constexpr uint64_t kNoTask = 0xffffffffu;

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel gomp_parallel() {
  static const GompParallel function = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return function;
}

int openmp_thread_number() {
  static const auto function = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
  return function();
}

inline void pause() { __builtin_ia32_pause(); }

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Closes a session at the end of the scope, also if an exception leaves it: helpers would wait for tasks for ever.
struct Closing {
  std::atomic<uint32_t>& closed;
  uint32_t session;
  ~Closing() { closed.store(session, std::memory_order_release); }
};

}  // namespace

bool ThreadPool::openmp_is_loaded() {
  return gomp_parallel() != nullptr && dlsym(RTLD_DEFAULT, "omp_get_thread_num") != nullptr;
}

ThreadPool::ThreadPool(int num_threads, Helpers helpers, std::vector<int> cpus)
    : num_threads_(num_threads), helpers_(helpers) {
  if (num_threads < 1) throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + ": must be at least 1");
  if (helpers == Helpers::openmp && !openmp_is_loaded())
    throw std::runtime_error("thread_pool=openmp: GNU OpenMP is not loaded in this process");
  if (helpers == Helpers::own) {
    try {
      for (int i = 0; i + 1 < num_threads; ++i)
        threads_.emplace_back([this, cpu = cpus.empty() ? -1 : cpus[i % cpus.size()]] { own_thread(cpu); });
    } catch (const std::system_error& error) {
      const size_t started = threads_.size() + 1;
      stop_own_threads();
      throw std::runtime_error("num_threads=" + std::to_string(num_threads) + ": only " + std::to_string(started) +
                               " threads can be started (" + error.what() + ")");
    }
  }
}

ThreadPool::~ThreadPool() { stop_own_threads(); }

void ThreadPool::stop_own_threads() {
  stopping_.store(true);
  opened_.fetch_add(1);
  futex_wake_all(opened_);
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::own_thread(int cpu) {
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a core outside the allowed set: stay unpinned
  }
  uint32_t seen = 0;
  while (true) {
    uint32_t opened = opened_.load(std::memory_order_acquire);
    for (int spin = 0; opened == seen && spin < kSpinsBeforeSleep; ++spin) {
      pause();
      opened = opened_.load(std::memory_order_acquire);
    }
    while (opened == seen) {
      sleepers_.fetch_add(1);
      futex_wait(opened_, seen);
      sleepers_.fetch_sub(1);
      opened = opened_.load(std::memory_order_acquire);
    }
    seen = opened;
    if (stopping_.load()) return;
    help_until_closed();
  }
}

void ThreadPool::help_until_closed() {
  const uint32_t session = opened_.load(std::memory_order_acquire);
  // By order, not equality: a helper may be off its core from before this session's end until after the next one's.
  while (static_cast<int32_t>(closed_.load(std::memory_order_acquire) - session) < 0) {
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (!take_one()) pause();
  }
}

void ThreadPool::run_session(void (*body)(void*), void* context) {
  if (num_threads_ == 1) {
    body(context);
    return;
  }
  const uint32_t session = opened_.load(std::memory_order_relaxed) + 1;
  if (helpers_ == Helpers::own) {
    opened_.store(session);
    if (sleepers_.load() > 0) futex_wake_all(opened_);
    const Closing closing{closed_, session};
    body(context);
    return;
  }
  opened_.store(session, std::memory_order_release);
  struct Region {
    ThreadPool* pool;
    void (*body)(void*);
    void* context;
    uint32_t session;
    std::exception_ptr error;  // out of body; unwinding through GNU OpenMP's frames would leave its region open for ever
  } region = {this, body, context, session, nullptr};
  gomp_parallel()(
      [](void* data) {
        Region& r = *static_cast<Region*>(data);
        if (openmp_thread_number() == 0) {
          const Closing closing{r.pool->closed_, r.session};
          try {
            r.body(r.context);
          } catch (...) {
            r.error = std::current_exception();
          }
        } else {
          r.pool->help_until_closed();
        }
      },
      &region, static_cast<unsigned>(num_threads_), 0);
  if (region.error) std::rethrow_exception(region.error);
}

// Takes and runs one task of the current phase. The claim succeeds only while `next_` is unchanged since the phase was
// read, and the caller closes `next_` before it rewrites the phase: a late helper never mixes two phases. If a task throws
// (out of memory), the process ends: unwinding would leave helpers with tasks of a frame that is gone.
bool ThreadPool::take_one() noexcept {
  uint64_t ticket = next_.load(std::memory_order_seq_cst);
  while (true) {
    const Task task = task_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    const uint32_t index = static_cast<uint32_t>(ticket);
    if (index >= static_cast<uint32_t>(count_.load(std::memory_order_relaxed))) return false;
    if (next_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_seq_cst)) {
      task(context, static_cast<int>(index));
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
}

void ThreadPool::run_phase(int count, Task task, void* context) {
  if (count <= 0) return;
  if (num_threads_ == 1 || count == 1) {
    for (int i = 0; i < count; ++i) task(context, i);
    return;
  }
  const uint64_t number = (next_.load(std::memory_order_relaxed) >> 32) + 1;
  next_.store(number << 32 | kNoTask, std::memory_order_seq_cst);
  task_.store(task, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  next_.store(number << 32, std::memory_order_seq_cst);
  while (take_one()) {
  }
  while (done_.load(std::memory_order_acquire) != count) pause();
}

}  // namespace hybrid_sparse
