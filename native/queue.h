// SPDX-License-Identifier: Apache-2.0
// Completions, from native threads to the thread that drains them. The eventfd is readable exactly while
// something lies in the queue, so an event loop can wait on it; a thread can also block in drain().
// Producers never wait and never see Python.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "slice.h"

namespace mooncake {

// Shared from this: who holds it natively holds no Python object, and so never waits for the interpreter.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  Queue();
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  int fileno() const { return eventfd_; }
  void push(Completion completion);
  // Up to `max_items`, oldest first; waits up to `timeout_s` for the first one.
  std::vector<Completion> drain(size_t max_items, double timeout_s);

 private:
  int eventfd_;
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Completion> items_;
};

using QueueRef = std::shared_ptr<Queue>;

}  // namespace mooncake
