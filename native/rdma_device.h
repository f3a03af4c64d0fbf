// SPDX-License-Identifier: Apache-2.0
// One RDMA device of this machine: its address on the fabric, the regions registered with it and the
// queue pairs that belong to it. A lane is a reliable connection to one queue pair of a peer's device:
// ours is an RdmaLane, used by one job at a time; the peer's end is served, which means that it only
// exists: the device answers for it without this process's doing.
//
//     us: RdmaLane ═════ reads and writes ═════▶ peer: served queue pair ──▶ its registered regions
//
// A region is registered with the device when it is first used and stays so until it closes. Then every
// job that uses it is stopped first, and deregistering makes the device refuse what peers still send; only
// then is the memory given back.
#pragma once

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "region.h"
#include "transport.h"
#include "verbs.h"

namespace mooncake {

// Where a device is on the fabric, and what it can take.
struct RdmaAddress {
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  uint8_t mtu = 1;    // as verbs count it: 1 is 256 bytes, 5 is 4096
  uint8_t reads = 1;  // how many reads it answers at a time
};

// One end of a lane.
struct LaneEnd {
  uint32_t pair;  // number of the queue pair in its device
  uint32_t psn;   // of the first packet it sends
};

struct RdmaOptions {
  int gid_index = -1;     // -1: the best there is
  int port = 1;           // of the device
  int traffic_class = 0;  // marks packets for the switches
};

// A region as one device knows it.
class Registration {
 public:
  Registration(RegionRef region, verbs::MemoryRegion* memory) : region(std::move(region)), memory(memory) {}
  uint32_t local_key() const { return memory->lkey; }
  uint32_t remote_key() const { return memory->rkey; }

 private:
  friend class RdmaDevice;
  const RegionRef region;
  verbs::MemoryRegion* const memory;
  int num_users = 0;  // guarded by the device's mutex
};

class RdmaDevice {
 public:
  static std::vector<std::string> names();  // throws std::system_error when there is no library

  // Throws std::system_error: no such device, no active port, no such address.
  RdmaDevice(const std::string& name, const RdmaOptions& options);
  ~RdmaDevice();
  RdmaDevice(const RdmaDevice&) = delete;
  RdmaDevice& operator=(const RdmaDevice&) = delete;

  const std::string& name() const { return name_; }
  const RdmaAddress& address() const { return address_; }
  uint32_t max_message() const { return max_message_; }

  // Registers the region unless it is already; every acquire() needs a release(). Null when the region is
  // closed; throws std::system_error when the device does not take it.
  Registration* acquire(const RegionRef& region);
  void release(Registration* registration);
  // Device memory that this card may reach: by a dma-buf, or by the peer-memory module of the GPU's driver.
  bool reaches(const Medium& medium) const;
  void forget(const Region& region);  // a closed one; returns when no job uses it and no peer reaches it

  // Ends for the peer's lanes, ready to answer. Throws std::system_error. `owner` is the peer's secret:
  // no other process may end them.
  std::vector<LaneEnd> serve(uint64_t owner, const RdmaAddress& peer, const std::vector<LaneEnd>& theirs);
  void retire(uint64_t owner, uint32_t pair);  // nothing that travelled through it lands after this
  size_t num_served() const;
  void stop_serving();

 private:
  friend class RdmaLane;
  verbs::QueuePair* new_pair(verbs::CompletionQueue* completions, uint32_t depth);
  void connect(verbs::QueuePair* pair, const RdmaAddress& peer, LaneEnd theirs, uint32_t psn) const;
  void choose_address(const RdmaOptions& options, const verbs::PortAttributes& port);
  verbs::MemoryRegion* register_memory(const Region& region) const;

  struct Served {
    verbs::QueuePair* pair;
    uint64_t owner;
    Clock::time_point probed;
  };
  void reap();  // with the mutex held: ends lanes whose peer is gone

  const verbs::Library& verbs_;
  const std::string name_;
  const uint8_t port_;
  const uint8_t traffic_class_;
  verbs::Context* context_ = nullptr;
  verbs::Domain* domain_ = nullptr;
  verbs::CompletionQueue* served_completions_ = nullptr;
  RdmaAddress address_;
  uint8_t gid_index_ = 0;
  bool is_ethernet_ = false;
  uint8_t max_reads_ = 1;  // that we have under way on one lane
  uint32_t max_depth_ = 1;
  uint32_t max_message_ = 1;

  mutable std::mutex mutex_;
  std::condition_variable unused_;
  std::unordered_map<const Region*, std::unique_ptr<Registration>> registered_;
  std::unordered_map<uint32_t, Served> served_;
  OwnProcess own_process_;
};

// Our end of a lane. Not thread-safe: one job at a time uses it. When the destructor has returned the
// device has stopped working on its behalf.
class RdmaLane {
 public:
  static constexpr uint32_t kDepth = 64;  // reads or writes under way

  explicit RdmaLane(std::shared_ptr<RdmaDevice> device);  // throws std::system_error
  ~RdmaLane();
  RdmaLane(const RdmaLane&) = delete;
  RdmaLane& operator=(const RdmaLane&) = delete;

  LaneEnd end() const { return {pair_->qp_num, psn_}; }
  LaneEnd far_end() const { return theirs_; }
  void join(const RdmaAddress& peer, LaneEnd theirs);  // throws std::system_error
  const RdmaDevice& device() const { return *device_; }

  bool post(verbs::Work* first);
  int poll(verbs::WorkDone* done, int count) { return verbs::poll_cq(completions_, count, done); }
  bool arm() { return verbs::arm(completions_) == 0; }
  void take_events();
  int events() const { return channel_->fd; }  // readable after arm() when something was done
  int bell() const { return bell_[0]; }        // readable after a shutdown() of it

 private:
  const std::shared_ptr<RdmaDevice> device_;
  verbs::Channel* channel_ = nullptr;
  verbs::CompletionQueue* completions_ = nullptr;
  verbs::QueuePair* pair_ = nullptr;
  int bell_[2] = {-1, -1};
  const uint32_t psn_;
  LaneEnd theirs_{};
  void free();
};

}  // namespace mooncake
