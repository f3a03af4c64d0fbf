// SPDX-License-Identifier: Apache-2.0
#include "ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace mooncake {

namespace {

unsigned* at(void* base, unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<uint8_t*>(base) + offset); }
unsigned load(unsigned* where) { return std::atomic_ref(*where).load(std::memory_order_acquire); }
void store(unsigned* where, unsigned value) { std::atomic_ref(*where).store(value, std::memory_order_release); }

}  // namespace

std::unique_ptr<Ring> Ring::open(unsigned depth, bool is_private, int& error) {
  io_uring_params params{};
  params.flags = is_private ? IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN : 0;
  auto setup = [&] { return static_cast<int>(syscall(__NR_io_uring_setup, depth, &params)); };
  std::unique_ptr<Ring> ring(new Ring());
  ring->fd_ = setup();
  if (ring->fd_ < 0 && errno == EINVAL && is_private) {  // a kernel before 6.1
    params = {};
    ring->fd_ = setup();
  }
  error = ring->fd_ < 0 ? errno : 0;
  if (error) return nullptr;
  if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_NODROP)) {  // before 5.5
    error = ENOSYS;
    return nullptr;
  }
  size_t size = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                 params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  auto map = [&](size_t bytes, uint64_t what) {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd_, static_cast<off_t>(what));
  };
  void* rings = map(size, IORING_OFF_SQ_RING);
  if (rings == MAP_FAILED) return error = errno, nullptr;
  ring->rings_ = rings, ring->rings_size_ = size;
  void* entries = map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
  if (entries == MAP_FAILED) return error = errno, nullptr;
  ring->entries_ = static_cast<io_uring_sqe*>(entries);
  ring->depth_ = params.sq_entries;
  ring->head_ = at(rings, params.sq_off.head), ring->tail_ = at(rings, params.sq_off.tail);
  ring->array_ = at(rings, params.sq_off.array), ring->mask_ = *at(rings, params.sq_off.ring_mask);
  ring->done_head_ = at(rings, params.cq_off.head), ring->done_tail_ = at(rings, params.cq_off.tail);
  ring->done_ = reinterpret_cast<io_uring_cqe*>(at(rings, params.cq_off.cqes));
  ring->done_mask_ = *at(rings, params.cq_off.ring_mask);
  return ring;
}

Ring::~Ring() {
  if (entries_) munmap(entries_, depth_ * sizeof(io_uring_sqe));
  if (rings_) munmap(rings_, rings_size_);
  if (fd_ >= 0) ::close(fd_);
}

io_uring_sqe* Ring::next() {
  unsigned tail = *tail_;  // ours to write
  if (tail - load(head_) == depth_) return nullptr;
  io_uring_sqe* entry = &entries_[tail & mask_];
  std::memset(entry, 0, sizeof *entry);
  array_[tail & mask_] = tail & mask_;
  return entry;
}

bool Ring::push(const FileIo& io, uint64_t token) {
  io_uring_sqe* entry = next();
  if (!entry) return false;
  entry->opcode = io.op == Op::kWrite ? IORING_OP_WRITE : IORING_OP_READ;
  entry->fd = io.fd;
  entry->addr = reinterpret_cast<uint64_t>(io.memory);
  entry->len = static_cast<unsigned>(io.length);
  entry->off = io.offset;
  entry->user_data = token;
  store(tail_, *tail_ + 1);
  num_pushed_++;
  return true;
}

bool Ring::push_nothing(uint64_t token) {
  io_uring_sqe* entry = next();
  if (!entry) return false;
  entry->opcode = IORING_OP_NOP;
  entry->user_data = token;
  store(tail_, *tail_ + 1);
  num_pushed_++;
  return true;
}

int Ring::submit(unsigned num_wanted) {
  while (true) {
    long count =
        syscall(__NR_io_uring_enter, fd_, num_pushed_, num_wanted, num_wanted ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    if (count >= 0) num_pushed_ -= static_cast<unsigned>(count);
    if (count >= 0 && num_pushed_ == 0) return 0;
    if (count < 0 && errno == EBUSY) return EBUSY;  // completions must be taken out first
    if (count < 0 && errno != EINTR && errno != EAGAIN) return errno;
    if (num_wanted) num_wanted = 1;
  }
}

int Ring::wait() {
  while (syscall(__NR_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0)
    if (errno != EINTR && errno != EAGAIN) return errno;
  return 0;
}

bool Ring::pop(uint64_t& token, int& result) {
  unsigned head = *done_head_;  // ours to write
  if (head == load(done_tail_)) return false;
  const io_uring_cqe& entry = done_[head & done_mask_];
  token = entry.user_data, result = entry.res;
  store(done_head_, head + 1);
  return true;
}

}  // namespace mooncake
