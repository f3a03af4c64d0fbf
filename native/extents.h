// SPDX-License-Identifier: Apache-2.0
// Memory still to be moved, front first: what is left of a payload after each system call.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mooncake {

class Extents {
 public:
  void clear() { items_.clear(), at_ = 0, bytes_ = 0; }
  void add(void* memory, size_t length) { items_.push_back({memory, length}), bytes_ += length; }
  void consume(size_t num_bytes);
  size_t bytes() const { return bytes_; }
  // The first extents, at most `limit` of them and about `max_bytes`, then `tail` if all fitted.
  void fill(std::vector<iovec>& vector, size_t limit, size_t max_bytes = SIZE_MAX) const;

 private:
  std::vector<iovec> items_;
  size_t at_ = 0;
  size_t bytes_ = 0;
};

}  // namespace mooncake
