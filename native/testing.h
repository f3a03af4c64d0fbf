// SPDX-License-Identifier: Apache-2.0
// What the tests below Python have in common: seeded noise, requests with a deadline, and a main() that
// names each test before it runs.
//
//     test_x [seed] [rounds]
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "transport.h"

namespace mooncake::testing {

inline std::mt19937_64 rng(1);

inline uint64_t below(uint64_t limit) { return limit ? rng() % limit : 0; }

inline std::vector<uint8_t> noise(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  return bytes;
}

inline uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

inline Request request(Op op, std::vector<Slice> slices, bool checksum = false,
                       Clock::duration patience = std::chrono::seconds(20)) {
  return {op, std::move(slices), checksum, Clock::now() + patience};
}

inline std::vector<RemoteRegion> published(const RegionTable& table) {
  std::vector<RemoteRegion> regions;
  for (const RegionRef& region : table.all())
    regions.push_back({region->address, region->size, region->key, region->is_writable});
  return regions;
}

// The seed of the command line, taken, and its number of rounds or 0.
inline int take_arguments(int argc, char** argv, unsigned long long& seed) {
  seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  rng.seed(seed);
  return argc > 2 ? std::atoi(argv[2]) : 0;
}

// While it lives, no thread can be started: the default stack is larger than the address space.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_t attributes;
    pthread_getattr_default_np(&attributes);
    pthread_attr_getstacksize(&attributes, &usual_);
    pthread_attr_destroy(&attributes);
    set(size_t{1} << 50);
  }
  ~NoThreads() { set(usual_); }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  static void set(size_t size) {
    pthread_attr_t attributes;
    pthread_getattr_default_np(&attributes);
    pthread_attr_setstacksize(&attributes, size);
    pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
  }
  size_t usual_ = 0;
};

using Tests = std::vector<std::pair<const char*, std::function<void()>>>;

inline void run_all(const Tests& tests, unsigned long long seed, const char* what = "") {
  for (auto& [name, test] : tests) {
    std::printf("%s%s\n", what, name);
    std::fflush(stdout);
    test();
  }
  std::printf("all passed (seed %llu)\n", seed);
}

}  // namespace mooncake::testing
