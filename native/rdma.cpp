// SPDX-License-Identifier: Apache-2.0
#include "rdma.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <deque>
#include <system_error>

#include "crc32c.h"

namespace mooncake {

namespace {

constexpr uint64_t kChunk = 256u << 10;                     // of a slice, so that lanes share a big one
constexpr uint64_t kWindow = 4u << 20;                      // bytes under way on one lane
constexpr size_t kBatch = 16;                               // handed to the device at once; its last one is signalled
constexpr uint64_t kLaneBytes = 1u << 20;                   // worth one more lane
constexpr auto kAttentive = std::chrono::microseconds(40);  // looking, before going to sleep

int milliseconds_left(Clock::time_point deadline) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

Status status_of(int work_status) {
  switch (work_status) {
    case verbs::kRemoteAccess:
      return Status::kAccessDenied;
    case verbs::kLocalLength:
    case verbs::kLocalProtection:
    case verbs::kLocalAccess:
    case verbs::kRemoteInvalidRequest:
      return Status::kProtocolError;
    default:
      return Status::kPeerLost;
  }
}

// The job's local regions as the device knows them, for as long as the job lasts. Those it does not reach are
// there for bytes that lie in staging memory meanwhile.
class Registrations {
 public:
  Registrations(RdmaDevice& device, const std::vector<RegionRef>& regions) : device_(device), regions_(regions) {}
  ~Registrations() {
    for (Registration* registration : held_)
      if (registration) device_.release(registration);
  }
  Status take() {
    try {
      for (const RegionRef& region : regions_) {
        bool is_there = !region->medium || device_.reaches(*region->medium);
        held_.push_back(is_there ? device_.acquire(region) : nullptr);
        if (is_there && !held_.back()) return Status::kCancelled;
      }
      return Status::kOk;
    } catch (const std::system_error&) {
      return Status::kPeerLost;  // this device cannot; another path may
    }
  }
  uint32_t local_key(const Slice& slice) const {
    size_t i = 0;
    while (i + 1 < regions_.size() && !(held_[i] && regions_[i]->contains(slice.local, slice.length))) i++;
    return held_[i]->local_key();
  }

 private:
  RdmaDevice& device_;
  const std::vector<RegionRef>& regions_;
  std::vector<Registration*> held_;
};

struct Piece {
  size_t slice;
  uint64_t offset;
  uint32_t length;
};

// A job on its lanes, from the first post to the last completion.
class Conversation {
 public:
  Conversation(Job& job, const Registrations& registrations, std::vector<uint32_t> remote_keys,
               const std::vector<std::unique_ptr<RdmaLane>>& lanes)
      : job_(job), registrations_(registrations), remote_keys_(std::move(remote_keys)) {
    for (const auto& lane : lanes) uses_.push_back({lane.get(), {}, 0, 0});
    max_piece_ = std::min<uint64_t>(kChunk, lanes[0]->device().max_message());
    skip_empty();
  }

  // False when a lane is no longer clean.
  bool drive() {
    while (true) {
      bool has_moved = false;
      for (Use& use : uses_)
        if (!post(use, has_moved)) return false;
      for (Use& use : uses_)
        if (!collect(use, has_moved)) return false;
      if (is_over()) return true;
      if (job_.stop.load() != Status::kOk) return fail(job_.stop.load());
      if (job_.is_late()) return fail(Status::kTimedOut);
      if (!has_moved && !wait()) return false;
    }
  }

  Status status() const { return status_; }
  int64_t failed_slice() const { return failed_slice_; }
  Checksums sums;

 private:
  struct Use {
    RdmaLane* lane;
    std::deque<Piece> posted;  // oldest first
    uint64_t num_done;         // the number of posted.front()
    uint64_t num_bytes;        // posted
  };

  bool fail(Status status, int64_t slice = -1) {
    status_ = status, failed_slice_ = slice;
    return false;
  }

  bool is_over() const {
    return slice_ == job_.request.slices.size() &&
           std::all_of(uses_.begin(), uses_.end(), [](const Use& use) { return use.posted.empty(); });
  }

  void skip_empty() {
    const auto& slices = job_.request.slices;
    while (slice_ < slices.size() && slices[slice_].length == 0) slice_++;
  }

  Piece cut() {
    const Slice& slice = job_.request.slices[slice_];
    Piece piece{slice_, offset_, static_cast<uint32_t>(std::min(max_piece_, slice.length - offset_))};
    offset_ += piece.length;
    if (offset_ == slice.length) {
      slice_++, offset_ = 0;
      skip_empty();
    }
    return piece;
  }

  // Hands the device one batch, if there is room for it.
  bool post(Use& use, bool& has_moved) {
    verbs::Work work[kBatch] = {};
    verbs::Extent extents[kBatch];
    size_t first_posted = use.posted.size(), count = 0;
    while (count < kBatch && slice_ < job_.request.slices.size() && use.posted.size() < RdmaLane::kDepth &&
           (use.posted.empty() || use.num_bytes < kWindow)) {
      Piece piece = cut();
      const Slice& slice = job_.request.slices[piece.slice];
      extents[count] = {slice.local + piece.offset, piece.length, registrations_.local_key(slice)};
      verbs::Work& next = work[count];
      next.wr_id = use.num_done + use.posted.size();
      next.sg_list = &extents[count];
      next.num_sge = 1;
      next.opcode = job_.request.op == Op::kWrite ? verbs::kRdmaWrite : verbs::kRdmaRead;
      next.rdma.remote_addr = slice.remote + piece.offset;
      next.rdma.rkey = remote_keys_[piece.slice];
      if (count) work[count - 1].next = &next;
      use.posted.push_back(piece);
      use.num_bytes += piece.length;
      count++;
    }
    if (count == 0) return true;
    work[count - 1].send_flags = verbs::kSignalled;
    has_moved = true;
    if (!use.lane->post(work)) return fail(Status::kPeerLost);
    if (job_.request.op == Op::kRead) return true;
    return add_sums(use, first_posted, first_posted + count);  // while the device works
  }

  bool add_sums(const Use& use, size_t begin, size_t end) {
    if (!job_.request.checksum) return true;
    Touch touch(job_.regions);
    if (!touch) return fail(Status::kCancelled);
    for (size_t i = begin; i < end; i++) {
      const Piece& piece = use.posted[i];
      const void* bytes = reinterpret_cast<const void*>(job_.request.slices[piece.slice].local + piece.offset);
      sums.add(piece.slice, piece.offset, piece.length, crc32c(bytes, piece.length));
    }
    return true;
  }

  // Takes what the device has done. A signalled piece stands for all before it.
  bool collect(Use& use, bool& has_moved) {
    verbs::WorkDone done[kBatch];
    if (use.posted.empty()) return true;
    int count = use.lane->poll(done, kBatch);
    if (count < 0) return fail(Status::kPeerLost);
    for (int i = 0; i < count; i++) {
      if (done[i].wr_id - use.num_done >= use.posted.size()) return fail(Status::kProtocolError);
      size_t num_new = done[i].wr_id - use.num_done + 1;
      if (done[i].status != verbs::kSuccess)
        return fail(status_of(done[i].status), static_cast<int64_t>(use.posted[num_new - 1].slice));
      if (job_.request.op == Op::kRead && !add_sums(use, 0, num_new)) return false;
      for (size_t j = 0; j < num_new; j++) use.num_bytes -= use.posted[j].length;
      use.posted.erase(use.posted.begin(), use.posted.begin() + static_cast<std::ptrdiff_t>(num_new));
      use.num_done += num_new;
    }
    has_moved |= count > 0;
    return true;
  }

  bool collect_all(bool& has_moved) {
    for (Use& use : uses_)
      if (!collect(use, has_moved)) return false;
    return true;
  }

  bool wait() {
    bool has_moved = false;
    auto look_until = Clock::now() + kAttentive;
    while (!has_moved && Clock::now() < look_until) {
      if (!collect_all(has_moved)) return false;
      if (!has_moved) sched_yield();
    }
    if (has_moved) return true;
    std::vector<pollfd> entries;
    for (Use& use : uses_) {
      if (!use.lane->arm()) return fail(Status::kPeerLost);
      entries.push_back({use.lane->events(), POLLIN, 0});
      entries.push_back({use.lane->bell(), POLLIN, 0});
    }
    if (!collect_all(has_moved)) return false;  // what was done before it was armed rings no bell
    if (has_moved || job_.stop.load() != Status::kOk) return true;
    poll(entries.data(), entries.size(), milliseconds_left(job_.request.deadline));
    for (size_t i = 0; i < uses_.size(); i++)
      if (entries[2 * i].revents) uses_[i].lane->take_events();
    return true;
  }

  Job& job_;
  const Registrations& registrations_;
  const std::vector<uint32_t> remote_keys_;
  uint64_t max_piece_;
  std::vector<Use> uses_;
  size_t slice_ = 0;  // what is cut next
  uint64_t offset_ = 0;
  Status status_ = Status::kOk;
  int64_t failed_slice_ = -1;
};

}  // namespace

void RdmaFence::add(std::vector<RetiredLane> lanes, bool has_written) {
  std::lock_guard lock(mutex_);
  lanes_.insert(lanes_.end(), lanes.begin(), lanes.end());
  has_written_ |= has_written && !lanes.empty();
}

std::vector<RetiredLane> RdmaFence::pending() const {
  std::lock_guard lock(mutex_);
  return lanes_;
}

void RdmaFence::remove(const std::vector<RetiredLane>& lanes) {
  std::lock_guard lock(mutex_);
  std::erase_if(lanes_, [&](const RetiredLane& lane) {
    return std::any_of(lanes.begin(), lanes.end(),
                       [&](const RetiredLane& gone) { return gone.pair == lane.pair && gone.device == lane.device; });
  });
  has_written_ &= !lanes_.empty();
}

bool RdmaFence::is_down() const {
  std::lock_guard lock(mutex_);
  return has_written_;
}

RdmaPeer::RdmaPeer(std::shared_ptr<RegionTable> local, std::shared_ptr<RdmaDevice> device, std::string their_device,
                   std::shared_ptr<RdmaFence> fence, int num_lanes)
    : Peer(std::move(local), {}, std::max(2, num_lanes)),
      device_(std::move(device)),
      their_device_(std::move(their_device)),
      fence_(std::move(fence)),
      num_lanes_(static_cast<size_t>(num_lanes)) {}

RdmaPeer::~RdmaPeer() { RdmaPeer::release(); }

// The peer's ends stay until the next set-up, or until it notices that no peer answers.
void RdmaPeer::release() {
  std::vector<RetiredLane> retired;
  for (const auto& lane : idle_) retired.push_back({their_device_, lane->far_end().pair});
  num_alive_ -= idle_.size();
  idle_.clear();
  offered_.clear();
  fence_->add(std::move(retired), false);
}

bool RdmaPeer::is_ready() {
  std::lock_guard lock(mutex_);
  return num_alive_ >= num_lanes_ && has_all_grants() && !fence_->is_down();
}

bool RdmaPeer::is_able() {
  std::lock_guard lock(mutex_);
  return num_alive_ > 0 && has_all_grants() && !fence_->is_down();
}

void RdmaPeer::set_regions(std::vector<RemoteRegion> remote) {
  {
    std::lock_guard lock(mutex_);
    auto kept = std::make_shared<Grants>();
    unknown_.clear();
    for (const RemoteRegion& region : remote) {
      auto known = grants_->find(region.key);
      if (known != grants_->end()) kept->insert(*known);
      else unknown_.push_back(region.key);
    }
    grants_ = std::move(kept);
  }
  set_remote(std::move(remote));
}

std::vector<uint64_t> RdmaPeer::unknown_keys(size_t limit) {
  std::lock_guard lock(mutex_);
  return {unknown_.begin(), unknown_.begin() + static_cast<std::ptrdiff_t>(std::min(limit, unknown_.size()))};
}

void RdmaPeer::learn(const std::vector<Grant>& grants) {
  std::lock_guard lock(mutex_);
  auto more = std::make_shared<Grants>(*grants_);
  for (const Grant& grant : grants) {
    (*more)[grant.key] = grant;
    std::erase(unknown_, grant.key);
  }
  grants_ = std::move(more);
}

std::vector<LaneEnd> RdmaPeer::offer() {
  std::unique_lock lock(mutex_);
  size_t num_missing = num_lanes_ - std::min(num_lanes_, num_alive_);
  lock.unlock();
  Lanes lanes;
  std::vector<LaneEnd> ends;
  for (size_t i = 0; i < num_missing; i++) {
    lanes.push_back(std::make_unique<RdmaLane>(device_));
    ends.push_back(lanes.back()->end());
  }
  lock.lock();
  std::swap(offered_, lanes);
  lock.unlock();
  return ends;
}

void RdmaPeer::join(const RdmaAddress& peer, const std::vector<LaneEnd>& theirs) {
  std::unique_lock lock(mutex_);
  Lanes lanes = std::move(offered_);
  offered_.clear();
  lock.unlock();
  size_t count = std::min(lanes.size(), theirs.size());
  for (size_t i = 0; i < count; i++) {
    try {
      lanes[i]->join(peer, theirs[i]);
    } catch (...) {
      std::vector<RetiredLane> unused;
      for (const LaneEnd& end : theirs) unused.push_back({their_device_, end.pair});
      fence_->add(std::move(unused), false);
      throw;
    }
  }
  lanes.resize(count);
  lock.lock();
  num_alive_ += count;
  for (auto& lane : lanes) idle_.push_back(std::move(lane));
  freed_.notify_all();
}

// At least one lane, up to `wanted`; waits while all are in use.
Status RdmaPeer::take_lanes(Job& job, size_t wanted, Lanes& lanes) {
  std::unique_lock lock(mutex_);
  while (idle_.empty()) {
    if (job.stop.load() != Status::kOk) return job.stop.load();
    if (num_alive_ == 0) return Status::kPeerLost;  // all ended meanwhile
    if (freed_.wait_until(lock, job.request.deadline) == std::cv_status::timeout && job.is_late())
      return Status::kTimedOut;
  }
  while (lanes.size() < wanted && !idle_.empty()) {
    lanes.push_back(std::move(idle_.back()));
    idle_.pop_back();
    job.sockets.push_back(lanes.back()->bell());
  }
  return Status::kOk;
}

void RdmaPeer::give_back(Job& job, Lanes lanes, bool is_clean) {
  std::unique_lock lock(mutex_);
  for (const auto& lane : lanes) std::erase(job.sockets, lane->bell());
  if (is_clean && job.stop.load() == Status::kOk) {
    for (auto& lane : lanes) idle_.push_back(std::move(lane));
    lanes.clear();
  }
  num_alive_ -= lanes.size();
  lock.unlock();
  freed_.notify_all();
  std::vector<RetiredLane> retired;
  for (const auto& lane : lanes) retired.push_back({their_device_, lane->far_end().pair});
  lanes.clear();  // waits for the device
  fence_->add(std::move(retired), !is_clean && job.request.op == Op::kWrite);
}

Completion RdmaPeer::execute(Job& job) {
  std::shared_ptr<const Grants> grants;
  {
    std::lock_guard lock(mutex_);
    grants = grants_;
  }
  const auto& slices = job.request.slices;
  std::vector<uint32_t> remote_keys(slices.size());
  uint64_t num_bytes = 0;
  for (size_t i = 0; i < slices.size(); i++) {
    if (slices[i].length == 0) continue;
    auto found = grants->find(job.keys[i]);
    bool is_allowed = found != grants->end() && (found->second.is_writable || job.request.op == Op::kRead);
    if (is_allowed) {
      RemoteRegion region{found->second.address, found->second.size, 0};
      is_allowed = region.contains(slices[i].remote, slices[i].length);
    }
    if (!is_allowed) {
      bool is_beyond = found != grants->end() && found->second.size == 0 && found->second.address != 0;
      Status status = is_beyond ? Status::kPeerLost : Status::kAccessDenied;  // perhaps another path reaches it
      return job.failed(status, static_cast<int64_t>(i));
    }
    remote_keys[i] = found->second.remote_key;
    num_bytes += slices[i].length;
  }
  Registrations registrations(*device_, job.regions);
  if (Status status = registrations.take(); status != Status::kOk) return job.failed(status);
  Lanes lanes;
  size_t wanted = std::clamp<size_t>(num_bytes / kLaneBytes, 1, num_lanes_);
  if (Status status = take_lanes(job, wanted, lanes); status != Status::kOk) return job.failed(status);
  Conversation conversation(job, registrations, std::move(remote_keys), lanes);
  bool is_clean = conversation.drive();
  give_back(job, std::move(lanes), is_clean);
  if (!is_clean) {
    Status status = job.stop.load() == Status::kOk ? conversation.status() : job.stop.load();
    int64_t slice = conversation.failed_slice();
    if (status == Status::kAccessDenied && slice >= 0) {
      std::lock_guard lock(mutex_);  // the region is gone: ask before it is tried again
      auto fewer = std::make_shared<Grants>(*grants_);
      uint64_t key = job.keys[static_cast<size_t>(slice)];
      if (fewer->erase(key)) unknown_.push_back(key);
      grants_ = std::move(fewer);
    }
    return job.failed(status, slice);
  }
  Completion completion;
  completion.num_bytes = num_bytes;
  if (job.request.checksum) completion.checksums = conversation.sums.per_slice(slices.size());
  return completion;
}

RdmaTransport::RdmaTransport(std::shared_ptr<RegionTable> regions, const std::vector<std::string>& devices,
                             const RdmaOptions& options)
    : regions_(std::move(regions)) {
  for (const std::string& name : devices) {
    try {
      devices_.push_back(std::make_shared<RdmaDevice>(name, options));
    } catch (const std::system_error& error) {
      throw std::system_error(error.code(), name + ": " + error.what());
    }
  }
}

std::shared_ptr<RdmaDevice> RdmaTransport::device(const std::string& name) const {
  for (const auto& device : devices_)
    if (device->name() == name) return device;
  return nullptr;
}

std::shared_ptr<RdmaPeer> RdmaTransport::connect(const std::string& name, const std::string& their_device,
                                                 uint64_t epoch, std::vector<RemoteRegion> remote, int num_lanes) {
  std::shared_ptr<RdmaDevice> ours = device(name);
  if (!ours) return nullptr;
  std::lock_guard lock(mutex_);
  std::erase_if(fences_, [](auto& entry) { return entry.second.use_count() == 1 && !entry.second->is_down(); });
  std::shared_ptr<RdmaFence>& fence = fences_[epoch];
  if (!fence) fence = std::make_shared<RdmaFence>();
  auto peer = std::make_shared<RdmaPeer>(regions_, ours, their_device, fence, num_lanes);
  peer->set_regions(std::move(remote));
  std::erase_if(peers_, [](auto& known) { return known.expired(); });
  peers_.push_back(peer);
  return peer;
}

std::vector<Grant> RdmaTransport::grant(const std::string& name, const std::vector<uint64_t>& keys) {
  std::shared_ptr<RdmaDevice> ours = device(name);
  std::vector<Grant> grants;
  for (uint64_t key : keys) {
    grants.push_back({key, 0, 0, 0, false});
    RegionRef region = ours ? regions_->find_key(key) : nullptr;
    Registration* registration = nullptr;
    try {
      registration = region ? ours->acquire(region) : nullptr;
    } catch (const std::system_error&) {
      if (!region->medium) throw;
      grants.back().address = region->address;
    }
    if (!registration) continue;
    grants.back() = {key, region->address, region->size, registration->remote_key(), region->is_writable};
    ours->release(registration);
  }
  return grants;
}

void RdmaTransport::region_closed(const Region& region) {
  std::vector<std::shared_ptr<RdmaPeer>> peers;
  {
    std::lock_guard lock(mutex_);
    for (const auto& weak : peers_)
      if (auto peer = weak.lock()) peers.push_back(std::move(peer));
  }
  for (const auto& peer : peers) peer->region_closed(region);
  for (const auto& device : devices_) device->forget(region);
}

void RdmaTransport::close() {
  std::lock_guard lock(mutex_);
  for (const auto& device : devices_) device->stop_serving();
}

}  // namespace mooncake
