// SPDX-License-Identifier: Apache-2.0
// CRC32C (Castagnoli), alone and fused with a copy. A checksummed copy reads the source once: the
// bytes are folded into the checksum while they are in registers, so it costs hardly more than the
// copy. The widest implementation the processor has is chosen once, at start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mooncake {

// Checksum of `length` bytes, continuing from `seed` (the checksum of what came before; 0 at the start).
uint32_t crc32c(const void* data, size_t length, uint32_t seed = 0);

// Checksum of A followed by B from their checksums and B's length.
uint32_t crc32c_combine(uint32_t a, uint32_t b, uint64_t length_b);

// Copies and checksums the source. The ranges must not overlap. `streaming` stores go around the
// cache: right for a job too big to be found there by its next reader.
uint32_t copy_crc32c(void* to, const void* from, size_t length, uint32_t seed, bool streaming);

// Copies: memcpy, or around the cache, which spares reading the destination first.
void copy(void* to, const void* from, size_t length, bool streaming);

const char* crc32c_implementation();  // "avx512", "sse42" or "table"

namespace detail {                           // for tests: every implementation that this processor runs must agree
std::vector<const char*> implementations();  // best first
void choose(const char* name);
}  // namespace detail

}  // namespace mooncake
