// SPDX-License-Identifier: Apache-2.0
#include "extents.h"

#include <algorithm>

namespace mooncake {

void Extents::consume(size_t num_bytes) {
  bytes_ -= num_bytes;
  while (num_bytes > 0) {
    iovec& first = items_[at_];
    size_t step = std::min(num_bytes, first.iov_len);
    first.iov_base = static_cast<uint8_t*>(first.iov_base) + step;
    first.iov_len -= step;
    num_bytes -= step;
    if (first.iov_len == 0) at_++;
  }
}

void Extents::fill(std::vector<iovec>& vector, size_t limit, size_t max_bytes) const {
  vector.clear();
  for (size_t i = at_; i < items_.size() && vector.size() < limit && max_bytes > 0; i++) {
    vector.push_back({items_[i].iov_base, std::min(items_[i].iov_len, max_bytes)});
    max_bytes -= vector.back().iov_len;
  }
}

}  // namespace mooncake
