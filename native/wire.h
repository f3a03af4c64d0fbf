// SPDX-License-Identifier: Apache-2.0
// The TCP data protocol: fixed little-endian structs and the checks a receiver makes before it
// trusts any of them. In short:
//
//     client                                server
//     Hello{epoch, lane}               ──▶
//                                      ◀──  Hello{epoch, status}
//     Frame{write, n, bytes} n×WireSlice payload  ──▶
//                                      ◀──  Frame{reply, status, failed}
//     Frame{read, n, bytes} n×WireSlice           ──▶
//                                      ◀──  Frame{reply, status, bytes} payload
//     Frame{fence, n} n×WireSlice{lane}           ──▶
//                                      ◀──  Frame{reply}
//
// A client that gives up a write closes its connection, but bytes it had sent may still be on their way
// into the server's memory. A fence names such lanes; once it is answered, nothing of theirs lands.
//
// With TLS, all of this travels inside it. A server answers a greeting that it must refuse in the plain, so
// that a client of another version, or one that speaks TLS where the server does not, can say what is wrong.
//
// A frame whose slices lie in files or on devices moves at most 8 MiB of them, or it is denied.
//
// Replies come in the order of the requests. A slice the receiver may not touch denies the whole
// frame and keeps the connection; bytes that make no sense end it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "slice.h"

namespace mooncake::wire {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

constexpr uint32_t kMagic = 0x434b4f4d;  // "MOKC"
constexpr uint8_t kVersion = 2;
constexpr uint32_t kMaxSlices = 1024;          // per frame
constexpr uint64_t kMaxPayload = 64ull << 20;  // per frame

enum class Kind : uint8_t { kWrite = 1, kRead = 2, kReply = 3, kFence = 4 };

constexpr uint8_t kTlsRecord = 0x16;  // what a TLS client's first byte is

// Why a server refuses a connection. Numbers on the wire: never change their meaning.
enum class Refusal : uint8_t { kNone = 0, kOtherProcess = 1, kOtherVersion = 2, kWantsTls = 3, kHasNoTls = 4 };

struct Hello {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  Refusal refusal = Refusal::kNone;  // in the answer
  uint16_t zero = 0;
  uint64_t epoch = 0;  // of the process that the client expects
  uint64_t lane = 0;   // random and never zero: the connection's name in a fence
};
static_assert(sizeof(Hello) == 24);

struct Frame {
  uint32_t magic = kMagic;
  Kind kind = Kind::kReply;
  uint8_t status = 0;          // replies
  uint16_t error = 0;          // replies with kIoError: the errno
  uint32_t num_slices = 0;     // requests
  uint32_t failed_slice = 0;   // replies with a status: which slice of the frame
  uint64_t number = 0;         // replies repeat the request's
  uint64_t payload_bytes = 0;  // what follows (write, read reply) or is requested (read)
};
static_assert(sizeof(Frame) == 32);

struct WireSlice {
  uint64_t address;  // in the server; in a fence the lane
  uint64_t length;   // never zero; zero in a fence
  uint64_t key;      // zero in a fence
};
static_assert(sizeof(WireSlice) == 24);

bool is_hello(const Hello& hello);
bool is_hello_of_other_version(const Hello& hello);  // looks at its first 8 bytes
bool is_request(const Frame& frame);
bool is_reply(const Frame& frame);
// The slices add up to the frame's payload, none is empty, none wraps around.
bool fits(const Frame& frame, std::span<const WireSlice> slices);

}  // namespace mooncake::wire
