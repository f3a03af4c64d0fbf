// SPDX-License-Identifier: Apache-2.0
// A slice: so many bytes here and so many bytes there. It knows no transport, no key and no object;
// everything that travels through this extension is columns of slices going in and completions
// coming out. These numbers are also the numbers Python sees, so they never change meaning.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace mooncake {

using Clock = std::chrono::steady_clock;

enum class Op : uint8_t {
  kWrite = 1,  // local -> remote
  kRead = 2,   // remote -> local
};

enum class Status : uint8_t {
  kOk = 0,
  kPeerLost = 1,       // the connection broke, was refused, or the peer is gone
  kAccessDenied = 2,   // the target has no such range under that key, or no longer
  kCancelled = 3,      // cancel(), close(), or the local memory was unregistered
  kTimedOut = 4,       // the deadline passed first
  kUnregistered = 5,   // local memory of a slice was never registered; nothing was started
  kProtocolError = 6,  // the peer sent what it may not send
  kIoError = 7,        // a file or device refused; the completion's `reason` says why
};

struct Slice {
  uint64_t local;   // address in this process
  uint64_t remote;  // address in the peer
  uint64_t length;  // bytes; zero is legal and moves nothing
};

struct Completion {
  uint64_t token = 0;
  Status status = Status::kOk;
  int64_t failed_slice = -1;        // the first slice known to have failed, or -1
  uint64_t num_bytes = 0;           // bytes moved when status is kOk
  std::vector<uint32_t> checksums;  // CRC32C of each slice, when requested and status is kOk
  int error = 0;                    // with kIoError: the errno
  bool is_partial = false;          // not the end: so many bytes have been moved so far
  std::string reason;               // what is wrong and what to do, where the status alone cannot say
};

}  // namespace mooncake
