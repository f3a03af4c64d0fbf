// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <future>
#include <new>
#include <thread>

#include "region.h"

namespace mooncake {

namespace {
constexpr auto kWorkerIdle = std::chrono::seconds(10);
constexpr auto kLook = std::chrono::milliseconds(20);
}  // namespace

std::string reason_of(int error) {
  switch (error) {
    case 0:
      return "the device refused";
    case ENOSPC:
    case EDQUOT:
      return "no space is left on the device; make room, or write less";
    case EAGAIN:
      return "a process that takes part can start no thread; raise its limits of processes and memory";
    case ENODATA:
      return "the file is shorter than its region; it was truncated after it was opened";
    default:
      return std::string(std::strerror(error)) + "; see the kernel's log of the host that has the device";
  }
}

// Threads of one medium: a slow one does not delay those of others. They own what they need, so that a medium
// may end in one of them.
struct Medium::Workers : std::enable_shared_from_this<Workers> {
  std::mutex mutex;
  std::condition_variable offered;
  std::deque<std::function<void()>> tasks;
  int num_threads = 0, num_idle = 0;
  bool is_over = false;

  // False: the system gives no thread, and there is none. Must not throw: event loops call it.
  bool add(std::function<void()> task, int max_threads) {
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    if (static_cast<size_t>(num_idle) >= tasks.size() || num_threads >= max_threads) {
      offered.notify_one();
      return true;
    }
    try {
      std::thread([self = shared_from_this()] { self->work(); }).detach();
    } catch (const std::exception&) {  // std::system_error, or std::bad_alloc of the thread's state
      if (num_threads > 0) return true;
      tasks.pop_back();
      return false;
    }
    num_threads++;
    return true;
  }

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      if (tasks.empty()) {
        if (is_over) break;
        num_idle++;
        bool has_more = offered.wait_for(lock, kWorkerIdle, [&] { return is_over || !tasks.empty(); });
        num_idle--;
        if (!has_more) break;
        continue;
      }
      std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // before the mutex: it may be the last to hold the medium
      lock.lock();
    }
    num_threads--;
  }
};

Medium::~Medium() {
  if (!workers_) return;
  std::lock_guard lock(workers_->mutex);
  workers_->is_over = true;
  workers_->offered.notify_all();
}

bool Medium::hand_over(std::function<void()> task, int max_threads) {
  std::shared_ptr<Workers> workers;
  {
    std::lock_guard lock(mutex_);
    if (!workers_) workers_ = std::make_shared<Workers>();
    workers = workers_;
  }
  return workers->add(std::move(task), max_threads);
}

void Medium::start(Op op, uint64_t offset, void* memory, uint64_t length, Done done) {
  bool is_taken = hand_over([this, op, offset, memory, length, done] {
    done(op == Op::kWrite ? write(offset, memory, length) : read(offset, memory, length));
  });
  if (!is_taken) done({Status::kIoError, EAGAIN});
}

Staging& Staging::serving() {
  static auto* staging = new Staging();  // never freed: threads may still use it at exit
  return *staging;
}

Staging& Staging::moving() {
  static auto* staging = new Staging();
  return *staging;
}

Staging::Staging() {
  void* memory = mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(memory);
  for (size_t i = kNumChunks; i > 0; i--) free_.push_back(i - 1);  // low ones first: they stay warm
}

Staging::~Staging() { munmap(base_, size()); }

Staging::Lease& Staging::Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  if (!chunks_.empty()) from_->give_back(chunks_);
  chunks_ = std::move(other.chunks_), from_ = other.from_;
  other.chunks_.clear();
  return *this;
}

Staging::Lease::~Lease() {
  if (!chunks_.empty()) from_->give_back(chunks_);
}

bool Staging::is_wanted() {
  std::lock_guard lock(mutex_);
  while (!wants_.empty() && wants_.front().expired()) wants_.pop_front();
  return !wants_.empty();
}

bool Staging::take(const std::shared_ptr<Want>& want) {
  std::lock_guard lock(mutex_);
  while (!wants_.empty() && wants_.front().expired()) wants_.pop_front();
  if (!wants_.empty() || want->count > free_.size()) {
    wants_.push_back(want);
    return false;
  }
  want->lease.from_ = this;
  want->lease.chunks_.assign(free_.end() - static_cast<ptrdiff_t>(want->count), free_.end());
  free_.resize(free_.size() - want->count);
  want->is_given = true;
  return true;
}

bool Staging::is_given(const std::shared_ptr<Want>& want) {
  std::lock_guard lock(mutex_);
  return want->is_given;
}

bool Staging::take(size_t count, Clock::time_point deadline, const std::atomic<Status>& stop, Lease& lease) {
  auto want = std::make_shared<Want>();
  auto given = std::make_shared<std::promise<void>>();
  want->count = count, want->wake = [given] { given->set_value(); };
  if (!take(want)) {
    auto is_here = given->get_future();
    while (is_here.wait_until(std::min(deadline, Clock::now() + kLook)) != std::future_status::ready)
      if (Clock::now() >= deadline || stop.load() != Status::kOk) break;
    if (!is_given(want)) return false;  // the place in the queue ends with `want`
  }
  lease = std::move(want->lease);
  return true;
}

void Staging::give_back(const std::vector<size_t>& chunks) {
  std::vector<std::shared_ptr<Want>> served;
  std::shared_ptr<Want> next;  // outlives the mutex: it may be the last to hold it
  {
    std::lock_guard lock(mutex_);
    free_.insert(free_.end(), chunks.begin(), chunks.end());
    while (!wants_.empty()) {
      std::shared_ptr<Want> want = wants_.front().lock();
      if (want && want->count > free_.size()) {
        next = std::move(want);
        break;
      }
      wants_.pop_front();
      if (!want) continue;
      want->lease.from_ = this;
      want->lease.chunks_.assign(free_.end() - static_cast<ptrdiff_t>(want->count), free_.end());
      free_.resize(free_.size() - want->count);
      want->is_given = true;
      served.push_back(std::move(want));
    }
  }
  for (auto& want : served) want->wake();
}

uint64_t Layout::add(const std::shared_ptr<Region>& region, uint64_t offset, uint64_t length, size_t slice,
                     uint64_t begin, size_t max_chunks) {
  uint64_t alignment = region->medium->alignment(), placed = 0;
  while (placed < length) {
    Move* last = moves.empty() ? nullptr : &moves.back();
    bool goes_on = last && last->region == region && last->offset + last->length == offset + placed &&
                   last->at + last->length < Staging::kChunk;
    if (!goes_on) {
      uint64_t lead = (offset + placed) % alignment;
      uint64_t at = (at_ + alignment - 1) / alignment * alignment + lead;
      if (num_chunks_ == 0 || at >= Staging::kChunk) {
        if (num_chunks_ == max_chunks) break;
        num_chunks_++, at = lead;
      }
      moves.push_back({region, offset + placed, 0, num_chunks_ - 1, at, slice});
      last = &moves.back(), at_ = at;
    }
    uint64_t step = std::min(length - placed, Staging::kChunk - at_);
    pieces.push_back({slice, begin + placed, step, last->chunk, at_});
    last->length += step, at_ += step, placed += step;
  }
  return placed;
}

}  // namespace mooncake
