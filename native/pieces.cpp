// SPDX-License-Identifier: Apache-2.0
#include "pieces.h"

#include <algorithm>

namespace mooncake {

Pieces::Pieces(std::unique_ptr<Job> whole) : whole_(std::move(whole)) {
  const auto& slices = whole_->request.slices;
  uint64_t num_bytes = 0;
  for (const Slice& slice : slices) num_bytes += slice.length;
  is_whole_ = num_bytes <= kPieceBytes && slices.size() <= kPieceSlices;
}

Job& Pieces::next() {
  if (is_whole_) return *whole_;
  cut();
  return *piece_;
}

void Pieces::cut() {
  const Request& request = whole_->request;
  piece_ = std::make_unique<Job>(Request{request.op, {}, request.checksum, request.deadline});
  piece_->regions = whole_->regions;
  first_slice_ = slice_, first_offset_ = offset_;
  uint64_t room = kPieceBytes;
  while (slice_ < request.slices.size() && piece_->request.slices.size() < kPieceSlices) {
    const Slice& slice = request.slices[slice_];
    if (room == 0 && slice.length > 0)
      break;  // empty slices need no room: left over, they would be a piece without bytes
    uint64_t length = std::min(slice.length - offset_, room);
    piece_->request.slices.push_back({slice.local + offset_, slice.remote + offset_, length});
    piece_->keys.push_back(whole_->keys[slice_]);
    room -= length, offset_ += length;
    if (offset_ == slice.length) slice_++, offset_ = 0;
  }
}

void Pieces::finish(Completion completion) {
  if (is_whole_) {
    completion_ = std::move(completion), is_over_ = true;
    return;
  }
  if (completion.status != Status::kOk) {
    if (completion.failed_slice >= 0) completion.failed_slice += static_cast<int64_t>(first_slice_);
    completion_ = std::move(completion), is_over_ = true;
    return;
  }
  completion_.num_bytes += completion.num_bytes;
  const auto& slices = piece_->request.slices;
  for (size_t i = 0; i < completion.checksums.size(); i++)
    sums_.add(first_slice_ + i, i == 0 ? first_offset_ : 0, slices[i].length, completion.checksums[i]);
  is_over_ = slice_ == whole_->request.slices.size();
  if (is_over_ && whole_->request.checksum) completion_.checksums = sums_.per_slice(whole_->request.slices.size());
}

}  // namespace mooncake
