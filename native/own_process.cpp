// SPDX-License-Identifier: Apache-2.0
#include "own_process.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <bit>
#include <cstddef>

namespace mooncake {

namespace {

// One bit per descriptor: a child may take no lock, since the thread that held it in its parent is not there. Larger
// numbers, which only a process with a million open files has, are kept by children.
constexpr size_t kBits = 64, kNumWords = (1 << 20) / kBits;
std::atomic<uint64_t> left_to_parent[kNumWords];
std::atomic<size_t> num_used_words{0};

// Only what may be called between fork() and exec(): this runs in the child of every fork of the process.
void begin_child() {
  OwnProcess::num_forks.fetch_add(1, std::memory_order_relaxed);
  int nothing = -1, its_own_place = -1;
  for (size_t word = 0; word < num_used_words.load(); word++) {
    for (uint64_t bits = left_to_parent[word].exchange(0); bits != 0; bits &= bits - 1) {
      int fd = static_cast<int>(word * kBits) + std::countr_zero(bits);
      if (nothing < 0) nothing = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
      if (nothing < 0) {  // the process has as many descriptors as it may have: there is room under this number
        ::close(fd);
        nothing = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (nothing < 0) continue;
        if (nothing == fd) its_own_place = fd;
      }
      if (fd != nothing) dup3(nothing, fd, O_CLOEXEC);
    }
  }
  if (nothing >= 0 && nothing != its_own_place) ::close(nothing);
}

[[maybe_unused]] const int is_registered = pthread_atfork(nullptr, nullptr, begin_child);

std::atomic<uint64_t>* word_of(int fd) {
  auto word = static_cast<size_t>(fd) / kBits;
  return fd >= 0 && word < kNumWords ? &left_to_parent[word] : nullptr;
}

uint64_t bit_of(int fd) { return uint64_t{1} << (static_cast<size_t>(fd) % kBits); }

}  // namespace

std::atomic<uint32_t> OwnProcess::num_forks{0};

OwnProcess::OwnProcess() : num_forks_(num_forks.load(std::memory_order_relaxed)) {}

void leave_to_parent(int fd) {
  std::atomic<uint64_t>* word = word_of(fd);
  if (!word) return;
  auto needed = static_cast<size_t>(word - left_to_parent) + 1;
  size_t used = num_used_words.load();
  while (used < needed && !num_used_words.compare_exchange_weak(used, needed)) continue;
  word->fetch_or(bit_of(fd));
}

// In this order: another thread may get the number as soon as it is free.
void close_own(int fd) {
  if (std::atomic<uint64_t>* word = word_of(fd)) word->fetch_and(~bit_of(fd));
  ::close(fd);
}

}  // namespace mooncake
