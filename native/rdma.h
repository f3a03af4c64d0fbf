// SPDX-License-Identifier: Apache-2.0
// RDMA between registered regions: the device reads or writes the peer's memory, the peer's processor
// does nothing. Connections are set up in Python, by a conversation of both engines
// (transfer/transports/rdma.py); here is what they are made of.
//
//     RdmaPeer::offer()  ──▶ our ends ─── handshake ──▶  RdmaDevice::serve()   their ends
//     RdmaPeer::join()   ◀── their ends ── handshake ──  RdmaTransport::grant() keys of their regions
//
// A job takes lanes that no other job uses. One that fails or is stopped ends its lanes: they are destroyed
// before execute() returns, so the device is done with the job's memory, and the peer's ends are retired
// at the next set-up, so nothing it had sent lands later. Until then is_ready() is false.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "rdma_device.h"
#include "transport.h"

namespace mooncake {

// What a peer's device lets us do with one of its regions.
struct Grant {
  uint64_t key;  // of the region
  uint64_t address;
  uint64_t size;  // zero: there is no such region, or, with an address, the device does not reach it
  uint32_t remote_key;
  bool is_writable;
};

struct RetiredLane {
  std::string device;  // the peer's
  uint32_t pair;
};

// Lanes to one process that ended here and not yet there; shared by all rails that lead to it.
class RdmaFence {
 public:
  void add(std::vector<RetiredLane> lanes, bool has_written);
  std::vector<RetiredLane> pending() const;
  void remove(const std::vector<RetiredLane>& lanes);
  bool is_down() const;  // something that was written may still land

 private:
  mutable std::mutex mutex_;
  std::vector<RetiredLane> lanes_;
  bool has_written_ = false;
};

class RdmaPeer final : public Peer {
 public:
  RdmaPeer(std::shared_ptr<RegionTable> local, std::shared_ptr<RdmaDevice> device, std::string their_device,
           std::shared_ptr<RdmaFence> fence, int num_lanes);
  ~RdmaPeer() override;

  // All lanes are there, all regions are known, nothing is pending behind the fence.
  bool is_ready();
  // A job may begin: as above, but a few lanes may be missing.
  bool is_able();

  void set_regions(std::vector<RemoteRegion> remote);
  std::vector<uint64_t> unknown_keys(size_t limit);
  void learn(const std::vector<Grant>& grants);

  std::vector<LaneEnd> offer();  // ends for the lanes that are missing; throws std::system_error
  void join(const RdmaAddress& peer, const std::vector<LaneEnd>& theirs);  // throws std::system_error
  std::vector<RetiredLane> retired() const { return fence_->pending(); }
  void forget_retired(const std::vector<RetiredLane>& lanes) { fence_->remove(lanes); }
  const RdmaDevice& device() const { return *device_; }

 protected:
  Completion execute(Job& job) override;
  // Sums are the processor's work, so such bytes must pass where it sees them.
  bool takes(const Medium& medium, const Request& request) const override {
    return !request.checksum && device_->reaches(medium);
  }
  void wake() override { freed_.notify_all(); }
  void release() override;

 private:
  using Lanes = std::vector<std::unique_ptr<RdmaLane>>;
  using Grants = std::unordered_map<uint64_t, Grant>;

  Status take_lanes(Job& job, size_t wanted, Lanes& lanes);
  void give_back(Job& job, Lanes lanes, bool is_clean);
  bool has_all_grants() const { return unknown_.empty(); }

  const std::shared_ptr<RdmaDevice> device_;
  const std::string their_device_;
  const std::shared_ptr<RdmaFence> fence_;
  const size_t num_lanes_;
  Lanes idle_;
  Lanes offered_;         // waiting for join()
  size_t num_alive_ = 0;  // idle or in use
  std::shared_ptr<const Grants> grants_ = std::make_shared<Grants>();
  std::vector<uint64_t> unknown_;  // keys the peer has not answered for
  std::condition_variable freed_;
};

class RdmaTransport : public RegionListener {
 public:
  // Throws std::system_error, whose text begins with the device.
  RdmaTransport(std::shared_ptr<RegionTable> regions, const std::vector<std::string>& devices,
                const RdmaOptions& options);
  const std::vector<std::shared_ptr<RdmaDevice>>& devices() const { return devices_; }
  std::shared_ptr<RdmaDevice> device(const std::string& name) const;  // null when it is not ours

  std::shared_ptr<RdmaPeer> connect(const std::string& device, const std::string& their_device, uint64_t epoch,
                                    std::vector<RemoteRegion> remote, int num_lanes);
  // Registers the regions with the device. Throws std::system_error.
  std::vector<Grant> grant(const std::string& device, const std::vector<uint64_t>& keys);
  void region_closed(const Region& region) override;
  void close();

 private:
  const std::shared_ptr<RegionTable> regions_;
  std::vector<std::shared_ptr<RdmaDevice>> devices_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<RdmaPeer>> peers_;
  std::unordered_map<uint64_t, std::shared_ptr<RdmaFence>> fences_;  // by the peer's epoch
  bool is_closed_ = false;
};

}  // namespace mooncake
