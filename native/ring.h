// SPDX-License-Identifier: Apache-2.0
// io_uring by its system calls: reads and writes that a file's device works on while the caller goes on.
// Containers often forbid it; then open() says so and the caller uses threads.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "slice.h"

namespace mooncake {

// One read or write of one file.
struct FileIo {
  Op op;
  int fd;
  uint8_t* memory;
  uint64_t length;
  uint64_t offset;
  bool is_direct = false;  // around the page cache: offset and length are multiples of the device's unit
};

// One thread fills and submits at a time, one takes out; these may be different ones unless `is_private`.
class Ring {
 public:
  // Null, and the errno, when the kernel has none for us. Private: only ever used by the calling thread,
  // which spares the kernel from interrupting it.
  static std::unique_ptr<Ring> open(unsigned depth, bool is_private, int& error);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  bool push(const FileIo& io, uint64_t token);  // false: full, submit first
  bool push_nothing(uint64_t token);            // completes at once
  // Hands over what was pushed and waits for at least `num_wanted` completions. 0 or an errno.
  int submit(unsigned num_wanted);
  int wait();  // for one completion, without submitting
  bool pop(uint64_t& token, int& result);

 private:
  Ring() = default;
  io_uring_sqe* next();

  int fd_ = -1;
  void* rings_ = nullptr;
  size_t rings_size_ = 0;
  io_uring_sqe* entries_ = nullptr;
  unsigned depth_ = 0;
  unsigned num_pushed_ = 0;  // since the last submit
  unsigned *head_ = nullptr, *tail_ = nullptr, *array_ = nullptr, mask_ = 0;
  unsigned *done_head_ = nullptr, *done_tail_ = nullptr, done_mask_ = 0;
  io_uring_cqe* done_ = nullptr;
};

}  // namespace mooncake
