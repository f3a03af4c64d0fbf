// SPDX-License-Identifier: Apache-2.0
#include "shm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "crc32c.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace mooncake {

namespace {

// Jobs from these sizes on are stored around the cache. Writes early: they go to a pool far bigger than
// any cache, where they are not read soon. Reads late: the reader is about to use the bytes.
constexpr uint64_t kStreamingWrite = 1 << 20;
constexpr uint64_t kStreamingRead = 16 << 20;
constexpr uint64_t kLong = 32 << 10;    // streaming a shorter slice waits longer than it saves
constexpr uint64_t kFaultIn = 2 << 20;  // mapped at once when first touched

// Where there are no huge pages, a page fault per 4 KiB makes the first pass over a pool ten times as slow
// as the second. Asking for many pages at once costs a fifth of that, and asking to read them less than
// to write: the kernel maps shared memory writable either way, and reads it maps by the dozen.
void fault_in(const Region& region, std::vector<std::atomic<bool>>& touched, uint64_t here, uint64_t length) {
  for (uint64_t part = (here - region.address) / kFaultIn; part * kFaultIn < here - region.address + length; part++) {
    if (touched[part].exchange(true, std::memory_order_relaxed)) continue;
    auto* start = reinterpret_cast<uint8_t*>(region.address + part * kFaultIn);
    madvise(start, std::min(kFaultIn, region.size - part * kFaultIn), MADV_POPULATE_READ);
  }
}

}  // namespace

ShmPeer::Mapping ShmPeer::map(const SharingMessage& message, int descriptor) {
  Mapping mapping;
  if (descriptor >= 0) mapping.region = map_shared(descriptor, message.size, message.key);
  if (mapping.region)
    mapping.touched = std::make_shared<std::vector<std::atomic<bool>>>(mapping.region->size / kFaultIn + 1);
  return mapping;
}

// The device copies from or to the mapping itself, without staging memory of ours between.
Outcome ShmPeer::copy_device(const Portion& portion, const cuda::DeviceMemory& here) {
  std::vector<cuda::Piece> pieces;
  for (const Slice& slice : portion.slices) {
    if (slice.length) fault_in(*portion.mapping.region, *portion.mapping.touched, slice.remote, slice.length);
    pieces.push_back({slice.remote, slice.local, slice.length});
  }
  auto toward = portion.request.op == Op::kWrite ? cuda::Toward::kHost : cuda::Toward::kDevice;
  return cuda::outcome_of(here.cuda->copy(here.device, toward, pieces, false, portion.checksums));
}

Outcome ShmPeer::copy(const Portion& portion) {
  if (const auto* device = cuda::device_memory(*portion.regions[0])) return copy_device(portion, *device);
  bool is_write = portion.request.op == Op::kWrite;
  bool is_big = portion.job_bytes >= (is_write ? kStreamingWrite : kStreamingRead);
  for (size_t i = 0; i < portion.slices.size(); i++) {
    const Slice& slice = portion.slices[i];
    if (slice.length == 0) continue;
    fault_in(*portion.mapping.region, *portion.mapping.touched, slice.remote, slice.length);
    auto* to = reinterpret_cast<void*>(is_write ? slice.remote : slice.local);
    auto* from = reinterpret_cast<const void*>(is_write ? slice.local : slice.remote);
    bool streams = is_big && slice.length >= kLong;
    uint32_t* sum = portion.checksums ? portion.checksums + i : nullptr;
    if (sum) *sum = copy_crc32c(to, from, slice.length, *sum, streams);
    else mooncake::copy(to, from, slice.length, streams);
  }
  return {};
}

RegionRef ShmPeer::view(uint64_t address, uint64_t length, Clock::time_point deadline, uint64_t& here) {
  std::optional<RemoteRegion> remote = remote_of(address, length);
  Mapping mapping;
  if (!remote || find(remote->key, deadline, nullptr, mapping) != Status::kOk) return nullptr;
  return mapping.locate(address, length, here) ? mapping.region : nullptr;
}

bool ShmTransport::show(const Region& region, SharingMessage& answer, int& descriptor) {
  descriptor = region.fd;
  return region.fd >= 0;
}

std::shared_ptr<SharingPeer> ShmTransport::make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) {
  return std::make_shared<ShmPeer>(regions_, std::move(remote), std::move(socket));
}

}  // namespace mooncake
