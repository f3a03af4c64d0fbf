// SPDX-License-Identifier: Apache-2.0
// A submitted job in pieces, so that a more urgent one can go in between and its progress can be
// reported. Each piece is a job of its own to the transport; what came of them is one completion.
#pragma once

#include <memory>

#include "transport.h"

namespace mooncake {

// Big enough that the pause between two pieces (a round trip) is lost in them, small enough that an
// urgent job waits milliseconds: at 4 GB/s a piece takes 4 ms.
constexpr uint64_t kPieceBytes = 16 << 20;
constexpr size_t kPieceSlices = 1 << 16;

class Pieces {
 public:
  explicit Pieces(std::unique_ptr<Job> whole);

  const Request& request() const { return whole_->request; }
  Job& next();                         // the piece to carry now; valid until finish()
  void finish(Completion completion);  // what came of it
  bool is_over() const { return is_over_; }
  // When over, what came of all; before, the bytes moved so far.
  Completion completion() const { return completion_; }

 private:
  void cut();

  std::unique_ptr<Job> whole_;
  std::unique_ptr<Job> piece_{};  // null: the whole job is one piece
  size_t slice_ = 0;              // where the next piece begins
  uint64_t offset_ = 0;
  size_t first_slice_ = 0;  // where the current one did
  uint64_t first_offset_ = 0;
  Checksums sums_{};
  Completion completion_{};
  bool is_whole_ = false;
  bool is_over_ = false;
};

}  // namespace mooncake
