// SPDX-License-Identifier: Apache-2.0
#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Sources of the algorithms: slicing-by-8 is Kounavis and Berry, "Novel Table Lookup-Based Algorithms
// for High-Performance CRC Generation" (2008); three interleaved crc32 instruction streams and the
// carry-less folding are Gopal et al., Intel white papers on CRC computation (2009, 2011).

namespace mooncake {

namespace {

// The polynomial with its bits reversed: bit 31 is x^0, as in all arithmetic below.
constexpr uint32_t kPolynomial = 0x82f63b78;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; bit--) {
    if (a >> bit & 1) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^(8 * num_bytes) modulo the polynomial: what a checksum is multiplied with to move past that many bytes.
constexpr uint32_t shift_of(uint64_t num_bytes) {
  uint32_t result = 1u << 31, power = 1u << 23;  // x^0, x^8
  for (; num_bytes; num_bytes >>= 1) {
    if (num_bytes & 1) result = multiply(power, result);
    power = multiply(power, power);
  }
  return result;
}

constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (size_t slice = 1; slice < 8; slice++)
    for (uint32_t byte = 0; byte < 256; byte++)
      tables[slice][byte] = (tables[slice - 1][byte] >> 8) ^ tables[0][tables[slice - 1][byte] & 0xff];
  return tables;
}();

uint64_t load64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint32_t raw_table(const uint8_t* data, size_t length, uint32_t crc) {
  for (; length >= 8; data += 8, length -= 8) {
    uint64_t word = load64(data) ^ crc;
    crc = 0;
    for (size_t i = 0; i < 8; i++) crc ^= kTables[7 - i][word >> (8 * i) & 0xff];
  }
  for (; length; data++, length--) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return crc;
}

using Raw = uint32_t (*)(const uint8_t*, size_t, uint32_t);
using RawCopy = uint32_t (*)(uint8_t*, const uint8_t*, size_t, uint32_t, bool);
using Copy = void (*)(uint8_t*, const uint8_t*, size_t);

constexpr size_t kPiece = 8 << 10;  // lies in the first-level cache between checksum and copy

template <Raw raw>
uint32_t raw_copy_by_pieces(uint8_t* to, const uint8_t* from, size_t length, uint32_t crc, bool) {
  while (length) {
    size_t piece = std::min(length, kPiece);
    crc = raw(from, piece, crc);
    std::memcpy(to, from, piece);
    to += piece, from += piece, length -= piece;
  }
  return crc;
}

#if defined(__x86_64__)

// Multiplication with a constant, four table look-ups: joins the three interleaved streams.
struct Shift {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  constexpr explicit Shift(uint64_t num_bytes) {
    uint32_t factor = shift_of(num_bytes);
    for (uint32_t i = 0; i < 4; i++)
      for (uint32_t byte = 0; byte < 256; byte++) tables[i][byte] = multiply(factor, byte << (8 * i));
  }
  uint32_t operator()(uint32_t crc) const {
    return tables[0][crc & 0xff] ^ tables[1][crc >> 8 & 0xff] ^ tables[2][crc >> 16 & 0xff] ^ tables[3][crc >> 24];
  }
};

#define MOONCAKE_SSE42 __attribute__((target("sse4.2")))
#define MOONCAKE_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))

MOONCAKE_SSE42 uint32_t raw_short(const uint8_t* data, size_t length, uint32_t crc) {
  uint64_t wide = crc;
  for (; length >= 8; data += 8, length -= 8) wide = _mm_crc32_u64(wide, load64(data));
  crc = static_cast<uint32_t>(wide);
  for (; length; data++, length--) crc = _mm_crc32_u8(crc, *data);
  return crc;
}

enum class Store { kNone, kCached, kStreaming };

inline void prefetch(const uint8_t* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }

// Kernels fold (and copy) whole blocks, or only copy them; they are given at least one block. They look
// ahead in memory themselves, because the hardware's prefetcher stops at the end of each page.

// Three streams, because the crc32 instruction takes three cycles but can begin every cycle.
struct Sse42 {
  static constexpr size_t kStream = 1024, kBlock = 3 * kStream;
  static const Shift kPastStream;

  template <Store store>
  static inline void put_line(uint8_t* to, const uint8_t* from) {
    for (size_t i = 0; i < 64; i += 16) {
      if constexpr (store == Store::kNone) break;
      __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      if constexpr (store == Store::kCached) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), value);
      if constexpr (store == Store::kStreaming) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), value);
    }
  }

  template <Store store>
  MOONCAKE_SSE42 static uint32_t fold(uint8_t* to, const uint8_t* from, size_t num_blocks, uint32_t crc) {
    uint64_t a = crc;
    for (; num_blocks > 0; num_blocks--, from += kBlock, to += kBlock) {
      uint64_t b = 0, c = 0;
      for (size_t line = 0; line < kStream; line += 64) {
        for (size_t stream = 0; stream < kBlock; stream += kStream) {
          prefetch(from + kBlock + stream + line);
          put_line<store>(to + stream + line, from + stream + line);
        }
        for (size_t i = line; i < line + 64; i += 8) {
          a = _mm_crc32_u64(a, load64(from + i));
          b = _mm_crc32_u64(b, load64(from + kStream + i));
          c = _mm_crc32_u64(c, load64(from + 2 * kStream + i));
        }
      }
      a = kPastStream(static_cast<uint32_t>(a)) ^ b;
      a = kPastStream(static_cast<uint32_t>(a)) ^ c;
    }
    return static_cast<uint32_t>(a);
  }

  static void stream(uint8_t* to, const uint8_t* from, size_t num_blocks) {
    for (size_t at = 0; at < num_blocks * kBlock; at += 64) {
      prefetch(from + at + kStream);
      put_line<Store::kStreaming>(to + at, from + at);
    }
  }
};
const Shift Sse42::kPastStream(kStream);

// A 128-bit lane moves `bits` ahead by two carry-less products with these constants.
constexpr uint64_t fold_constant(uint64_t bits) {
  uint32_t power = 1u << 31;
  for (uint64_t i = 0; i < bits; i++) power = times_x(power);
  return static_cast<uint64_t>(power) << 1;
}
template <uint64_t bits>
struct Fold {
  static constexpr uint64_t low = fold_constant(bits + 32), high = fold_constant(bits - 32);
};

MOONCAKE_AVX512 inline __m512i fold512(__m512i lane, __m512i next, __m512i by) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lane, by, 0x00), _mm512_clmulepi64_epi128(lane, by, 0x11),
                                   next, 0x96);
}

MOONCAKE_AVX512 inline __m128i fold128(__m128i lane, __m128i next, __m128i by) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00), _mm_clmulepi64_si128(lane, by, 0x11)), next);
}

// The checksum of a lane that stands for all bytes before it.
MOONCAKE_AVX512 inline uint32_t reduce(__m128i lane) {
  uint64_t rest = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(lane)));
  return static_cast<uint32_t>(_mm_crc32_u64(rest, static_cast<uint64_t>(_mm_extract_epi64(lane, 1))));
}

// Four accumulators of four lanes each, moved ahead by a block at a time.
struct Avx512 {
  static constexpr size_t kBlock = 256, kAhead = 1024;

  template <Store store>
  MOONCAKE_AVX512 static inline void put(uint8_t* to, __m512i value) {
    if constexpr (store == Store::kCached) _mm512_storeu_si512(to, value);
    if constexpr (store == Store::kStreaming) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
  }

  template <Store store>
  MOONCAKE_AVX512 static uint32_t fold(uint8_t* to, const uint8_t* from, size_t num_blocks, uint32_t crc) {
    const __m512i by2048 = _mm512_set4_epi64(Fold<2048>::high, Fold<2048>::low, Fold<2048>::high, Fold<2048>::low);
    const __m512i by512 = _mm512_set4_epi64(Fold<512>::high, Fold<512>::low, Fold<512>::high, Fold<512>::low);
    const __m128i by128 = _mm_set_epi64x(Fold<128>::high, Fold<128>::low);
    __m512i x[4];
    for (int i = 0; i < 4; i++) {
      x[i] = _mm512_loadu_si512(from + 64 * i);
      put<store>(to + 64 * i, x[i]);
    }
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    for (size_t block = 1; block < num_blocks; block++) {
      from += kBlock, to += kBlock;
      for (int i = 0; i < 4; i++) {
        prefetch(from + kAhead + 64 * i);
        __m512i next = _mm512_loadu_si512(from + 64 * i);
        put<store>(to + 64 * i, next);
        x[i] = fold512(x[i], next, by2048);
      }
    }
    alignas(64) __m128i lanes[4];
    _mm512_store_si512(lanes, fold512(fold512(fold512(x[0], x[1], by512), x[2], by512), x[3], by512));
    return reduce(fold128(fold128(fold128(lanes[0], lanes[1], by128), lanes[2], by128), lanes[3], by128));
  }

  MOONCAKE_AVX512 static void stream(uint8_t* to, const uint8_t* from, size_t num_blocks) {
    for (; num_blocks > 0; num_blocks--, to += kBlock, from += kBlock) {
      for (int i = 0; i < 4; i++) {
        prefetch(from + kAhead + 64 * i);
        put<Store::kStreaming>(to + 64 * i, _mm512_loadu_si512(from + 64 * i));
      }
    }
  }
};

template <class Kernel>
uint32_t raw_folded(const uint8_t* data, size_t length, uint32_t crc) {
  if (size_t num_blocks = length / Kernel::kBlock; num_blocks > 0) {
    // Nothing is stored, so the destination is never looked at.
    crc = Kernel::template fold<Store::kNone>(const_cast<uint8_t*>(data), data, num_blocks, crc);
    data += num_blocks * Kernel::kBlock, length -= num_blocks * Kernel::kBlock;
  }
  return raw_short(data, length, crc);
}

template <class Kernel>
uint32_t raw_copy_folded(uint8_t* to, const uint8_t* from, size_t length, uint32_t crc, bool streaming) {
  if (size_t odd = -reinterpret_cast<uintptr_t>(to) & 63; odd && length >= odd + 2 * Kernel::kBlock) {
    crc = raw_short(from, odd, crc);
    std::memcpy(to, from, odd);
    to += odd, from += odd, length -= odd;
  }
  streaming &= (reinterpret_cast<uintptr_t>(to) & 63) == 0;
  if (size_t num_blocks = length / Kernel::kBlock; num_blocks > 0) {
    crc = streaming ? Kernel::template fold<Store::kStreaming>(to, from, num_blocks, crc)
                    : Kernel::template fold<Store::kCached>(to, from, num_blocks, crc);
    if (streaming) _mm_sfence();
    to += num_blocks * Kernel::kBlock, from += num_blocks * Kernel::kBlock, length -= num_blocks * Kernel::kBlock;
  }
  crc = raw_short(from, length, crc);
  std::memcpy(to, from, length);
  return crc;
}

template <class Kernel>
void stream_copy(uint8_t* to, const uint8_t* from, size_t length) {
  size_t odd = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) & 63, length);
  std::memcpy(to, from, odd);
  to += odd, from += odd, length -= odd;
  size_t in_blocks = length / Kernel::kBlock * Kernel::kBlock;
  Kernel::stream(to, from, length / Kernel::kBlock);
  _mm_sfence();
  std::memcpy(to + in_blocks, from + in_blocks, length - in_blocks);
}

#endif

void plain_copy(uint8_t* to, const uint8_t* from, size_t length) { std::memcpy(to, from, length); }

struct Chosen {
  const char* name = "table";
  Raw raw = raw_table;
  RawCopy raw_copy = raw_copy_by_pieces<raw_table>;
  Copy stream = plain_copy;
};

constexpr Chosen kTable;
#if defined(__x86_64__)
constexpr Chosen kSse42{"sse42", raw_folded<Sse42>, raw_copy_folded<Sse42>, stream_copy<Sse42>};
constexpr Chosen kAvx512{"avx512", raw_folded<Avx512>, raw_copy_folded<Avx512>, stream_copy<Avx512>};
#endif

// What this processor can run, best first.
std::vector<const Chosen*> supported() {
  std::vector<const Chosen*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("vpclmulqdq"))
    found.push_back(&kAvx512);
  if (has_sse42) found.push_back(&kSse42);
#endif
  found.push_back(&kTable);
  return found;
}

const Chosen* chosen = supported().front();

}  // namespace

uint32_t crc32c(const void* data, size_t length, uint32_t seed) {
  return ~chosen->raw(static_cast<const uint8_t*>(data), length, ~seed);
}

uint32_t copy_crc32c(void* to, const void* from, size_t length, uint32_t seed, bool streaming) {
  return ~chosen->raw_copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), length, ~seed, streaming);
}

void copy(void* to, const void* from, size_t length, bool streaming) {
  (streaming ? chosen->stream : plain_copy)(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), length);
}

uint32_t crc32c_combine(uint32_t a, uint32_t b, uint64_t length_b) { return multiply(shift_of(length_b), a) ^ b; }

const char* crc32c_implementation() { return chosen->name; }

namespace detail {
std::vector<const char*> implementations() {
  std::vector<const char*> names;
  for (const Chosen* one : supported()) names.push_back(one->name);
  return names;
}
void choose(const char* name) {
  for (const Chosen* one : supported())
    if (std::strcmp(one->name, name) == 0) chosen = one;
}
}  // namespace detail

}  // namespace mooncake
