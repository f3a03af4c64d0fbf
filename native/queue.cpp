// SPDX-License-Identifier: Apache-2.0
#include "queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "own_process.h"

namespace mooncake {

Queue::Queue() : eventfd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (eventfd_ < 0) throw std::runtime_error("eventfd: no file descriptors left");
  leave_to_parent(eventfd_);  // a child that submits would wake the parent's event loop, which finds nothing
}

Queue::~Queue() { close_own(eventfd_); }

void Queue::push(Completion completion) {
  std::lock_guard lock(mutex_);
  items_.push_back(std::move(completion));
  if (items_.size() == 1) {
    uint64_t one = 1;
    (void)!write(eventfd_, &one, sizeof one);
  }
  filled_.notify_one();
}

std::vector<Completion> Queue::drain(size_t max_items, double timeout_s) {
  std::unique_lock lock(mutex_);
  if (items_.empty() && timeout_s > 0) {
    auto until = Clock::now() +
                 std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(timeout_s, 1e6)));
    filled_.wait_until(lock, until, [&] { return !items_.empty(); });
  }
  size_t count = std::min(max_items, items_.size());
  std::vector<Completion> taken(std::make_move_iterator(items_.begin()),
                                std::make_move_iterator(items_.begin() + static_cast<ptrdiff_t>(count)));
  items_.erase(items_.begin(), items_.begin() + static_cast<ptrdiff_t>(count));
  if (count > 0 && items_.empty()) {
    uint64_t seen;
    (void)!read(eventfd_, &seen, sizeof seen);
  }
  return taken;
}

}  // namespace mooncake
