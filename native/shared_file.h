// SPDX-License-Identifier: Apache-2.0
// Files of other processes of this host: the owner shows a descriptor (sharing.h draws the conversation), the
// peer opens the file anew by it and moves the bytes by its own ring, as if it had opened the file itself. The
// owner does nothing, and its memory sees no byte. What is shown is the file behind a region that was
// registered, to processes of the same user that know the region's key; closing the region takes it back.
//
// What was handed to the device when the owner died still lands: a process that gives the same file out again after a
// crash must wait for the writers of before (readers of it know by their leases).
#pragma once

#include "file.h"
#include "sharing.h"

namespace mooncake {

class SharedFilePeer final : public SharingPeer {
 public:
  SharedFilePeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, SharingSocketRef socket)
      : SharingPeer(std::move(local), std::move(remote), std::move(socket), 2) {}

 protected:
  // The region keeps the owner's addresses: it lies in no table of ours.
  Mapping map(const SharingMessage& message, int descriptor) override;
  Completion execute(Job& job) override;
};

class SharedFileTransport final : public SharingTransport {
 public:
  SharedFileTransport(std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::string& endpoint)
      : SharingTransport(std::move(regions), epoch, endpoint) {
    start();
  }
  ~SharedFileTransport() override { close(); }

 protected:
  bool show(const Region& region, SharingMessage& answer, int& descriptor) override;
  std::shared_ptr<SharingPeer> make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) override;
};

}  // namespace mooncake
