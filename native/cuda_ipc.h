// SPDX-License-Identifier: Apache-2.0
// Device memory of processes of this host: an owner shows a handle (sharing.h draws the conversation), the
// peer opens it and copies there and from there by itself, device to device without passing main memory.
// One engine reaches another of the same process in the same way, but by address: a driver does not open
// its own handles.
#pragma once

#include "cuda.h"
#include "sharing.h"

namespace mooncake::cuda {

class CudaPeer final : public CopyingPeer {
 public:
  CudaPeer(std::shared_ptr<Cuda> cuda, std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote,
           SharingSocketRef socket)
      : CopyingPeer(std::move(local), std::move(remote), std::move(socket)), cuda_(std::move(cuda)) {}

 protected:
  Mapping map(const SharingMessage& message, int descriptor) override;
  Outcome copy(const Portion& portion) override;
  uint64_t portion_bytes() const override { return kPortion; }
  bool takes(const Medium& medium, const Request&) const override { return is_device_memory(medium); }

 private:
  Result copy_memory(const Portion& portion, const Region& local, const DeviceMemory& there);
  Result copy_devices(const Portion& portion, const DeviceMemory& here, const DeviceMemory& there);

  const std::shared_ptr<Cuda> cuda_;
};

class CudaTransport final : public SharingTransport {
 public:
  CudaTransport(std::shared_ptr<Cuda> cuda, std::shared_ptr<RegionTable> regions, uint64_t epoch,
                const std::string& endpoint = "")
      : SharingTransport(std::move(regions), epoch, endpoint), cuda_(std::move(cuda)) {
    start();
  }
  ~CudaTransport() override { close(); }

 protected:
  bool show(const Region& region, SharingMessage& answer, int& descriptor) override;
  std::shared_ptr<SharingPeer> make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) override;

 private:
  const std::shared_ptr<Cuda> cuda_;
};

}  // namespace mooncake::cuda
