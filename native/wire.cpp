// SPDX-License-Identifier: Apache-2.0
#include "wire.h"

#include <algorithm>

namespace mooncake::wire {

bool is_hello(const Hello& hello) { return hello.magic == kMagic && hello.version == kVersion && hello.zero == 0; }

bool is_hello_of_other_version(const Hello& hello) { return hello.magic == kMagic && hello.version != kVersion; }

bool is_request(const Frame& frame) {
  bool moves = frame.kind == Kind::kWrite || frame.kind == Kind::kRead;
  bool has_bytes = frame.payload_bytes >= 1 && frame.payload_bytes <= kMaxPayload;
  bool is_sane = moves ? has_bytes : frame.kind == Kind::kFence && frame.payload_bytes == 0;
  return frame.magic == kMagic && is_sane && frame.status == 0 && frame.error == 0 && frame.num_slices >= 1 &&
         frame.num_slices <= kMaxSlices;
}

bool is_reply(const Frame& frame) {
  auto status = static_cast<Status>(frame.status);
  bool is_known = status == Status::kOk || status == Status::kAccessDenied || status == Status::kIoError;
  bool is_sane = is_known && (status == Status::kIoError || frame.error == 0);
  return frame.magic == kMagic && frame.kind == Kind::kReply && is_sane && frame.payload_bytes <= kMaxPayload;
}

bool fits(const Frame& frame, std::span<const WireSlice> slices) {
  if (frame.kind == Kind::kFence)
    return std::all_of(slices.begin(), slices.end(),
                       [](const WireSlice& slice) { return slice.length == 0 && slice.key == 0; });
  uint64_t left = frame.payload_bytes;
  for (const WireSlice& slice : slices) {
    if (slice.length == 0 || slice.length > left || slice.address > UINT64_MAX - slice.length) return false;
    left -= slice.length;
  }
  return left == 0;
}

}  // namespace mooncake::wire
