// SPDX-License-Identifier: Apache-2.0
#include "cuda_ipc.h"

#include <unistd.h>

#include <cstring>

namespace mooncake::cuda {

static_assert(sizeof(Export) <= sizeof(SharingMessage::shown));

SharingPeer::Mapping CudaPeer::map(const SharingMessage& message, int descriptor) {
  if (descriptor >= 0) ::close(descriptor);
  Mapping mapping;
  Export shown;
  std::memcpy(&shown, message.shown, sizeof shown);
  std::string why;
  mapping.region = cuda_->import(shown, message.size, message.key, why);
  mapping.status = Status::kPeerLost;  // this path does not lead there; another may
  return mapping;
}

// Copies of memory whose owner dies under them fail in ways that no driver writes down; whatever fails here,
// it is this path that failed, and another may lead there.
Outcome CudaPeer::copy(const Portion& portion) {
  const Region& local = *portion.regions[0];
  const DeviceMemory& there = *device_memory(*portion.mapping.region);
  const DeviceMemory* here = device_memory(local);
  Result result = here ? copy_devices(portion, *here, there) : copy_memory(portion, local, there);
  return {result == kSuccess ? Status::kOk : Status::kPeerLost};
}

Result CudaPeer::copy_memory(const Portion& portion, const Region& local, const DeviceMemory& there) {
  Toward toward = portion.request.op == Op::kWrite ? Toward::kDevice : Toward::kHost;
  std::vector<Piece> pieces;
  for (const Slice& slice : portion.slices) pieces.push_back({slice.local, slice.remote, slice.length});
  return cuda_->copy(there.device, toward, pieces, cuda_->is_pinned(local), portion.checksums);
}

Result CudaPeer::copy_devices(const Portion& portion, const DeviceMemory& here, const DeviceMemory& there) {
  bool is_write = portion.request.op == Op::kWrite;
  const DeviceMemory &to = is_write ? there : here, &from = is_write ? here : there;
  std::vector<Hop> hops;
  std::vector<Piece> read;
  for (const Slice& slice : portion.slices) {
    hops.push_back({is_write ? slice.remote : slice.local, is_write ? slice.local : slice.remote, slice.length});
    read.push_back({0, hops.back().from, slice.length});
  }
  Result result = cuda_->copy_between(to.device, from.device, hops);
  if (result == kSuccess && portion.checksums)
    result = cuda_->copy(from.device, Toward::kHost, read, false, portion.checksums);
  return result;
}

bool CudaTransport::show(const Region& region, SharingMessage& answer, int&) {
  const DeviceMemory* memory = device_memory(region);
  if (!memory || !memory->shown) return false;
  std::memcpy(answer.shown, &*memory->shown, sizeof *memory->shown);
  return true;
}

std::shared_ptr<SharingPeer> CudaTransport::make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) {
  return std::make_shared<CudaPeer>(cuda_, regions_, std::move(remote), std::move(socket));
}

}  // namespace mooncake::cuda
