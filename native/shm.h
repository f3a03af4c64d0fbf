// SPDX-License-Identifier: Apache-2.0
// Reads and writes on the same host: the peer's shared memory is mapped here (sharing.h draws the
// conversation) and copied by the caller's own thread, so the target process does nothing at all. Where the
// local bytes are in device memory, the device copies them, through pinned staging of the caller.
#pragma once

#include "cuda.h"
#include "sharing.h"

namespace mooncake {

class ShmPeer final : public CopyingPeer {
 public:
  using CopyingPeer::CopyingPeer;

  // The mapping behind [address, address + length) of the peer and where it starts here, or null.
  RegionRef view(uint64_t address, uint64_t length, Clock::time_point deadline, uint64_t& here);

 protected:
  Mapping map(const SharingMessage& message, int descriptor) override;
  Outcome copy(const Portion& portion) override;
  uint64_t portion_bytes() const override { return 4 << 20; }
  bool takes(const Medium& medium, const Request&) const override { return cuda::is_device_memory(medium); }

 private:
  Outcome copy_device(const Portion& portion, const cuda::DeviceMemory& here);
};

class ShmTransport final : public SharingTransport {
 public:
  ShmTransport(std::shared_ptr<RegionTable> regions, uint64_t epoch) : SharingTransport(std::move(regions), epoch) {
    start();
  }
  ~ShmTransport() override { close(); }

 protected:
  bool show(const Region& region, SharingMessage& answer, int& descriptor) override;
  std::shared_ptr<SharingPeer> make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) override;
};

}  // namespace mooncake
