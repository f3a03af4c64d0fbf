#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

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

constexpr size_t kStream = 1024;
const Shift kPastStream(kStream);

__attribute__((target("sse4.2"))) uint32_t raw_sse42(const uint8_t* data, size_t length, uint32_t crc) {
  uint64_t a = crc;
  for (; length >= 3 * kStream; data += 3 * kStream, length -= 3 * kStream) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, load64(data + i));
      b = _mm_crc32_u64(b, load64(data + kStream + i));
      c = _mm_crc32_u64(c, load64(data + 2 * kStream + i));
    }
    a = kPastStream(static_cast<uint32_t>(a)) ^ b;
    a = kPastStream(static_cast<uint32_t>(a)) ^ c;
  }
  for (; length >= 8; data += 8, length -= 8) a = _mm_crc32_u64(a, load64(data));
  crc = static_cast<uint32_t>(a);
  for (; length; data++, length--) crc = _mm_crc32_u8(crc, *data);
  return crc;
}

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

#define MOONCAKE_AVX512 __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul,sse4.2")))

MOONCAKE_AVX512 inline __m512i fold512(__m512i lane, __m512i next, __m512i by) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lane, by, 0x00), _mm512_clmulepi64_epi128(lane, by, 0x11),
                                   next, 0x96);
}

MOONCAKE_AVX512 inline __m128i fold128(__m128i lane, __m128i next, __m128i by) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, by, 0x00), _mm_clmulepi64_si128(lane, by, 0x11)), next);
}

enum class Store { kNone, kCached, kStreaming };

template <Store store>
MOONCAKE_AVX512 inline void put512(uint8_t* to, __m512i value) {
  if constexpr (store == Store::kCached) _mm512_storeu_si512(to, value);
  if constexpr (store == Store::kStreaming) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
}

constexpr size_t kAhead = 1024;  // the hardware prefetcher stops at page ends; this does not

// Folds (and copies) whole blocks of 256 bytes; at least one.
template <Store store>
MOONCAKE_AVX512 uint32_t fold_blocks(uint8_t* to, const uint8_t* from, size_t num_blocks, uint32_t crc) {
  const __m512i by2048 = _mm512_set4_epi64(Fold<2048>::high, Fold<2048>::low, Fold<2048>::high, Fold<2048>::low);
  const __m512i by512 = _mm512_set4_epi64(Fold<512>::high, Fold<512>::low, Fold<512>::high, Fold<512>::low);
  const __m128i by128 = _mm_set_epi64x(Fold<128>::high, Fold<128>::low);
  __m512i x[4];
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_loadu_si512(from + 64 * i);
    put512<store>(to + 64 * i, x[i]);
  }
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (size_t block = 1; block < num_blocks; block++) {
    from += 256, to += 256;
    for (int i = 0; i < 4; i++) {
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + 64 * i), _MM_HINT_T0);
      __m512i next = _mm512_loadu_si512(from + 64 * i);
      put512<store>(to + 64 * i, next);
      x[i] = fold512(x[i], next, by2048);
    }
  }
  __m512i sum = fold512(fold512(fold512(x[0], x[1], by512), x[2], by512), x[3], by512);
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, sum);
  __m128i lane = fold128(fold128(fold128(lanes[0], lanes[1], by128), lanes[2], by128), lanes[3], by128);
  uint64_t rest = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(lane)));
  return static_cast<uint32_t>(_mm_crc32_u64(rest, static_cast<uint64_t>(_mm_extract_epi64(lane, 1))));
}

MOONCAKE_AVX512 uint32_t raw_avx512(const uint8_t* data, size_t length, uint32_t crc) {
  if (size_t num_blocks = length / 256; num_blocks >= 2) {
    crc = fold_blocks<Store::kNone>(nullptr, data, num_blocks, crc);
    data += num_blocks * 256, length -= num_blocks * 256;
  }
  return raw_sse42(data, length, crc);
}

MOONCAKE_AVX512 uint32_t raw_copy_avx512(uint8_t* to, const uint8_t* from, size_t length, uint32_t crc,
                                         bool streaming) {
  if (size_t odd = -reinterpret_cast<uintptr_t>(to) & 63; odd && length >= odd + 512) {
    crc = raw_sse42(from, odd, crc);
    std::memcpy(to, from, odd);
    to += odd, from += odd, length -= odd;
  }
  streaming &= (reinterpret_cast<uintptr_t>(to) & 63) == 0;
  if (size_t num_blocks = length / 256; num_blocks >= 2) {
    crc = streaming ? fold_blocks<Store::kStreaming>(to, from, num_blocks, crc)
                    : fold_blocks<Store::kCached>(to, from, num_blocks, crc);
    if (streaming) _mm_sfence();
    to += num_blocks * 256, from += num_blocks * 256, length -= num_blocks * 256;
  }
  crc = raw_sse42(from, length, crc);
  std::memcpy(to, from, length);
  return crc;
}

MOONCAKE_AVX512 void stream_avx512(uint8_t* to, const uint8_t* from, size_t length) {
  size_t odd = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) & 63, length);
  std::memcpy(to, from, odd);
  to += odd, from += odd, length -= odd;
  for (; length >= 256; to += 256, from += 256, length -= 256) {
    for (int i = 0; i < 4; i++) {
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + 64 * i), _MM_HINT_T0);
      put512<Store::kStreaming>(to + 64 * i, _mm512_loadu_si512(from + 64 * i));
    }
  }
  _mm_sfence();
  std::memcpy(to, from, length);
}

#endif

void plain_copy(uint8_t* to, const uint8_t* from, size_t length) { std::memcpy(to, from, length); }

struct Chosen {
  const char* name = "table";
  Raw raw = raw_table;
  RawCopy raw_copy = raw_copy_by_pieces<raw_table>;
  Copy stream = plain_copy;
};

const Chosen kChosen = []() -> Chosen {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("vpclmulqdq"))
    return {"avx512", raw_avx512, raw_copy_avx512, stream_avx512};
  if (__builtin_cpu_supports("sse4.2")) return {"sse42", raw_sse42, raw_copy_by_pieces<raw_sse42>, plain_copy};
#endif
  return {};
}();

}  // namespace

uint32_t crc32c(const void* data, size_t length, uint32_t seed) {
  return ~kChosen.raw(static_cast<const uint8_t*>(data), length, ~seed);
}

uint32_t copy_crc32c(void* to, const void* from, size_t length, uint32_t seed, bool streaming) {
  return ~kChosen.raw_copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), length, ~seed, streaming);
}

void copy(void* to, const void* from, size_t length, bool streaming) {
  (streaming ? kChosen.stream : plain_copy)(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), length);
}

uint32_t crc32c_combine(uint32_t a, uint32_t b, uint64_t length_b) { return multiply(shift_of(length_b), a) ^ b; }

const char* crc32c_implementation() { return kChosen.name; }

namespace detail {
uint32_t crc32c_table(const void* data, size_t length, uint32_t seed) {
  return ~raw_table(static_cast<const uint8_t*>(data), length, ~seed);
}
#if defined(__x86_64__)
bool has_sse42() { return __builtin_cpu_supports("sse4.2"); }
uint32_t crc32c_sse42(const void* data, size_t length, uint32_t seed) {
  return ~raw_sse42(static_cast<const uint8_t*>(data), length, ~seed);
}
#else
bool has_sse42() { return false; }
uint32_t crc32c_sse42(const void* data, size_t length, uint32_t seed) { return crc32c_table(data, length, seed); }
#endif
}  // namespace detail

}  // namespace mooncake
