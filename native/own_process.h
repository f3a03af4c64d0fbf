// SPDX-License-Identifier: Apache-2.0
// What belongs to the process that made it, and not to the children that it forks: they have copies of its
// memory and of its descriptors, and none of its threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace mooncake {

// True in the process that constructed it, false in its forked children. Costs one load, because the kernel is not
// asked: a handler in the child counts the forks.
class OwnProcess {
 public:
  OwnProcess();
  explicit operator bool() const { return num_forks_ == num_forks.load(std::memory_order_relaxed); }
  static std::atomic<uint32_t> num_forks;  // from the first process that loaded this code to this one

 private:
  uint32_t num_forks_;
};

// Descriptors that a forked child must not keep: with its copies of sockets open, peers would take a process that has
// died for one that is there. From now on a child has something without a use under that number, which the child's
// copies of their owners close. A child that is forked between the system call that makes one and this call keeps it.
void leave_to_parent(int fd);
void close_own(int fd);  // ends that, and closes

}  // namespace mooncake
