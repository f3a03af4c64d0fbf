// SPDX-License-Identifier: Apache-2.0
#include "rdma_device.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "cuda.h"

namespace mooncake {

namespace {

using namespace std::chrono_literals;

constexpr uint8_t kTimeout = 14;    // 4.096 us x 2^14: 67 ms until a packet is sent again
constexpr uint8_t kRetries = 6;     // 7 means without limit on some devices
constexpr uint8_t kReads = 16;      // under way on one lane
constexpr auto kProbeEvery = 10s;   // a served lane whose peer may be gone
constexpr int kServedEntries = 64;  // completions of such probes
constexpr uint32_t kPsnMask = 0xffffff;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error ? error : EIO, std::generic_category(), what);
}

void check(int error, const std::string& what) {
  if (error) fail(error, what);
}

template <typename T>
T* check(T* made, const std::string& what) {
  if (!made) fail(errno, what);
  return made;
}

const verbs::Library& library() {
  std::string error;
  const verbs::Library* loaded = verbs::load(error);
  if (!loaded) fail(ELIBACC, error);
  return *loaded;
}

// One line of a file in /sys, or nothing.
std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool is_mapped_ipv4(const verbs::Gid& gid) {
  static constexpr uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, prefix, sizeof prefix) == 0;
}

bool is_link_local(const verbs::Gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

// How good an address of an Ethernet device is: routable ones reach furthest, and only version 2 has them.
int rank(const verbs::Gid& gid, bool is_version_2) {
  if (std::all_of(std::begin(gid.raw), std::end(gid.raw), [](uint8_t byte) { return byte == 0; })) return -1;
  return (is_version_2 ? 4 : 0) + (is_mapped_ipv4(gid) ? 2 : is_link_local(gid) ? 0 : 1);
}

}  // namespace

std::vector<std::string> RdmaDevice::names() {
  const verbs::Library& verbs = library();
  int count = 0;
  verbs::Device** devices = verbs.get_device_list(&count);
  std::vector<std::string> names;
  for (int i = 0; devices && i < count; i++) names.emplace_back(verbs.get_device_name(devices[i]));
  if (devices) verbs.free_device_list(devices);
  std::sort(names.begin(), names.end());
  return names;
}

RdmaDevice::RdmaDevice(const std::string& name, const RdmaOptions& options)
    : verbs_(library()),
      name_(name),
      port_(static_cast<uint8_t>(options.port)),
      traffic_class_(static_cast<uint8_t>(options.traffic_class)) {
  int count = 0;
  verbs::Device** devices = check(verbs_.get_device_list(&count), "listing RDMA devices");
  for (int i = 0; i < count && !context_; i++)
    if (name == verbs_.get_device_name(devices[i])) context_ = verbs_.open_device(devices[i]);
  int error = errno;
  verbs_.free_device_list(devices);
  if (!context_) fail(error ? error : ENODEV, "opening it");
  try {
    verbs::DeviceAttributes attributes{};
    verbs::PortAttributes port{};
    check(verbs_.query_device(context_, &attributes), "asking what it can do");
    check(verbs_.query_port(context_, port_, &port), "asking for its port");
    if (port.state != verbs::kPortActive) fail(ENETDOWN, "its port is not active");
    address_.lid = port.lid;
    address_.mtu = static_cast<uint8_t>(port.active_mtu);
    address_.reads = static_cast<uint8_t>(std::clamp<int>(attributes.max_qp_rd_atom, 1, kReads));
    max_reads_ = static_cast<uint8_t>(std::clamp<int>(attributes.max_qp_init_rd_atom, 1, kReads));
    max_depth_ = static_cast<uint32_t>(std::max(attributes.max_qp_wr, 1));
    max_message_ = port.max_msg_sz ? port.max_msg_sz : 1u << 30;
    is_ethernet_ = port.link_layer == verbs::kEthernet;
    choose_address(options, port);
    domain_ = check(verbs_.alloc_pd(context_), "making a protection domain");
    served_completions_ =
        check(verbs_.create_cq(context_, kServedEntries, nullptr, nullptr, 0), "making a completion queue");
  } catch (...) {
    if (domain_) verbs_.dealloc_pd(domain_);
    verbs_.close_device(context_);
    throw;
  }
}

RdmaDevice::~RdmaDevice() {
  if (!own_process_) return;  // the device's objects are the parent's
  stop_serving();
  for (auto& [region, registration] : registered_) verbs_.dereg_mr(registration->memory);
  verbs_.destroy_cq(served_completions_);
  verbs_.dealloc_pd(domain_);
  verbs_.close_device(context_);
}

void RdmaDevice::choose_address(const RdmaOptions& options, const verbs::PortAttributes& port) {
  verbs::Gid best{};
  int best_rank = -1;
  const std::string folder = "/sys/class/infiniband/" + name_ + "/ports/" + std::to_string(port_);
  int first = std::max(options.gid_index, 0);
  int last = options.gid_index >= 0 ? first : is_ethernet_ ? std::min(port.gid_tbl_len, 256) - 1 : 0;
  for (int i = first; i <= last; i++) {
    verbs::Gid gid{};
    if (verbs_.query_gid(context_, port_, i, &gid) != 0) continue;
    std::string type = read_line(folder + "/gid_attrs/types/" + std::to_string(i));
    int gid_rank = rank(gid, type.find("v2") != std::string::npos);
    if (gid_rank > best_rank) best = gid, best_rank = gid_rank, gid_index_ = static_cast<uint8_t>(i);
  }
  if (best_rank < 0 && (is_ethernet_ || options.gid_index >= 0)) fail(EADDRNOTAVAIL, "its port has no such address");
  std::copy(std::begin(best.raw), std::end(best.raw), address_.gid.begin());
}

bool RdmaDevice::reaches(const Medium& medium) const {
  static const bool has_peer_memory = access("/sys/module/nvidia_peermem", F_OK) == 0;
  return dynamic_cast<const cuda::DeviceMemory*>(&medium) && (verbs_.reg_dmabuf_mr || has_peer_memory);
}

// Memory of a GPU comes as a dma-buf, or else the peer-memory module of its driver finds it by address.
verbs::MemoryRegion* RdmaDevice::register_memory(const Region& region) const {
  int access = verbs::kRemoteRead;
  if (region.is_writable) access |= verbs::kLocalWrite | verbs::kRemoteWrite;
  if (region.medium) {
    const cuda::DeviceMemory* memory = cuda::device_memory(region);
    if (!memory || !reaches(*memory)) return errno = EOPNOTSUPP, nullptr;
    uint64_t offset = 0;
    int fd = verbs_.reg_dmabuf_mr ? memory->cuda->dma_buf(memory->address, region.size, offset) : -1;
    if (fd >= 0) {
      verbs::MemoryRegion* registered = verbs_.reg_dmabuf_mr(domain_, offset, region.size, region.address, fd, access);
      ::close(fd);
      if (registered) return registered;
    }
  }
  return verbs_.reg_mr(domain_, reinterpret_cast<void*>(region.address), region.size, access);
}

Registration* RdmaDevice::acquire(const RegionRef& region) {
  std::lock_guard lock(mutex_);  // also while registering: two at once would wait in the kernel as well
  if (region->is_closed()) return nullptr;
  std::unique_ptr<Registration>& known = registered_[region.get()];
  if (!known) {
    verbs::MemoryRegion* memory = register_memory(*region);
    if (!memory) {
      int error = errno;
      registered_.erase(region.get());
      fail(error, "registering " + std::to_string(region->size) + " bytes of memory");
    }
    known = std::make_unique<Registration>(region, memory);
  }
  known->num_users++;
  return known.get();
}

void RdmaDevice::release(Registration* registration) {
  std::lock_guard lock(mutex_);
  registration->num_users--;
  unused_.notify_all();
}

void RdmaDevice::forget(const Region& region) {
  if (!own_process_) return;
  std::unique_lock lock(mutex_);
  auto found = registered_.find(&region);
  if (found == registered_.end()) return;
  std::unique_ptr<Registration> registration = std::move(found->second);
  registered_.erase(found);
  unused_.wait(lock, [&] { return registration->num_users == 0; });
  lock.unlock();
  verbs_.dereg_mr(registration->memory);
}

verbs::QueuePair* RdmaDevice::new_pair(verbs::CompletionQueue* completions, uint32_t depth) {
  verbs::QueuePairInit init{};
  init.send_cq = init.recv_cq = completions;
  init.cap.max_send_wr = std::min(depth, max_depth_);
  init.cap.max_recv_wr = 1;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.qp_type = verbs::kReliableConnection;
  verbs::QueuePair* pair = check(verbs_.create_qp(domain_, &init), "making a queue pair");
  verbs::QueuePairAttributes attributes{};
  attributes.qp_state = verbs::kInit;
  attributes.port_num = port_;
  // What a peer may do is decided per region.
  attributes.qp_access_flags = verbs::kRemoteWrite | verbs::kRemoteRead;
  int mask = verbs::kMaskState | verbs::kMaskPkey | verbs::kMaskPort | verbs::kMaskAccess;
  if (int error = verbs_.modify_qp(pair, &attributes, mask)) {
    verbs_.destroy_qp(pair);
    fail(error, "preparing a queue pair");
  }
  return pair;
}

void RdmaDevice::connect(verbs::QueuePair* pair, const RdmaAddress& peer, LaneEnd theirs, uint32_t psn) const {
  verbs::QueuePairAttributes attributes{};
  attributes.qp_state = verbs::kReadyToReceive;
  attributes.path_mtu = std::clamp<int>(std::min(address_.mtu, peer.mtu), 1, 5);
  attributes.dest_qp_num = theirs.pair;
  attributes.rq_psn = theirs.psn & kPsnMask;
  attributes.max_dest_rd_atomic = address_.reads;
  attributes.min_rnr_timer = 12;
  verbs::AddressHandle& way = attributes.ah_attr;
  way.port_num = port_;
  way.dlid = peer.lid;
  way.is_global = is_ethernet_ || peer.lid == 0;
  if (way.is_global) {
    std::copy(peer.gid.begin(), peer.gid.end(), way.grh.dgid.raw);
    way.grh.sgid_index = gid_index_;
    way.grh.hop_limit = 64;
    way.grh.traffic_class = traffic_class_;
  }
  check(verbs_.modify_qp(pair, &attributes,
                         verbs::kMaskState | verbs::kMaskAddress | verbs::kMaskMtu | verbs::kMaskDestination |
                             verbs::kMaskReceivePsn | verbs::kMaskDestinationReads | verbs::kMaskRnrTimer),
        "connecting a queue pair");
  verbs::QueuePairAttributes ready{};
  ready.qp_state = verbs::kReadyToSend;
  ready.sq_psn = psn;
  ready.timeout = kTimeout;
  ready.retry_cnt = kRetries;
  ready.rnr_retry = kRetries;
  ready.max_rd_atomic = std::clamp<uint8_t>(peer.reads, 1, max_reads_);
  check(verbs_.modify_qp(pair, &ready,
                         verbs::kMaskState | verbs::kMaskSendPsn | verbs::kMaskTimeout | verbs::kMaskRetry |
                             verbs::kMaskRnrRetry | verbs::kMaskReads),
        "starting a queue pair");
}

std::vector<LaneEnd> RdmaDevice::serve(uint64_t owner, const RdmaAddress& peer, const std::vector<LaneEnd>& theirs) {
  std::lock_guard lock(mutex_);
  reap();
  std::vector<LaneEnd> ours;
  try {
    for (const LaneEnd& end : theirs) {
      verbs::QueuePair* pair = new_pair(served_completions_, 1);
      auto psn = static_cast<uint32_t>(random_key() & kPsnMask);
      served_[pair->qp_num] = {pair, owner, Clock::now()};
      ours.push_back({pair->qp_num, psn});
      connect(pair, peer, end, psn);
    }
  } catch (...) {
    for (const LaneEnd& end : ours) {
      verbs_.destroy_qp(served_[end.pair].pair);
      served_.erase(end.pair);
    }
    throw;
  }
  return ours;
}

// A killed peer does not end its lanes. An empty write to its end of a lane fails when the peer is gone.
void RdmaDevice::reap() {
  verbs::WorkDone done[16];
  while (int count = std::max(verbs::poll_cq(served_completions_, 16, done), 0)) {
    for (int i = 0; i < count; i++) {
      auto found = served_.find(done[i].qp_num);
      if (done[i].status == verbs::kSuccess || found == served_.end()) continue;
      verbs_.destroy_qp(found->second.pair);
      served_.erase(found);
    }
  }
  auto now = Clock::now();
  int budget = kServedEntries / 2;
  for (auto& [number, served] : served_) {
    if (now - served.probed < kProbeEvery || budget-- <= 0) continue;
    served.probed = now;
    verbs::Work probe{}, *bad = nullptr;
    probe.opcode = verbs::kRdmaWrite;
    probe.send_flags = verbs::kSignalled;
    verbs::post_send(served.pair, &probe, &bad);
  }
}

void RdmaDevice::retire(uint64_t owner, uint32_t pair) {
  std::lock_guard lock(mutex_);
  auto found = served_.find(pair);
  if (found == served_.end() || found->second.owner != owner) return;
  verbs_.destroy_qp(found->second.pair);
  served_.erase(found);
}

size_t RdmaDevice::num_served() const {
  std::lock_guard lock(mutex_);
  return served_.size();
}

void RdmaDevice::stop_serving() {
  std::lock_guard lock(mutex_);
  for (auto& [number, served] : served_) verbs_.destroy_qp(served.pair);
  served_.clear();
}

RdmaLane::RdmaLane(std::shared_ptr<RdmaDevice> device)
    : device_(std::move(device)), psn_(static_cast<uint32_t>(random_key() & kPsnMask)) {
  const verbs::Library& verbs = device_->verbs_;
  try {
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, bell_) ? errno : 0, "making a bell");
    channel_ = check(verbs.create_comp_channel(device_->context_), "making a completion channel");
    check(fcntl(channel_->fd, F_SETFL, O_NONBLOCK) ? errno : 0, "preparing a completion channel");
    completions_ =
        check(verbs.create_cq(device_->context_, kDepth + 1, nullptr, channel_, 0), "making a completion queue");
    pair_ = device_->new_pair(completions_, kDepth);
  } catch (...) {
    free();
    throw;
  }
}

RdmaLane::~RdmaLane() {
  if (device_->own_process_) free();
}

void RdmaLane::free() {
  const verbs::Library& verbs = device_->verbs_;
  if (pair_) verbs.destroy_qp(pair_);
  if (channel_ && completions_) take_events();
  if (completions_) verbs.destroy_cq(completions_);
  if (channel_) verbs.destroy_comp_channel(channel_);
  for (int fd : bell_)
    if (fd >= 0) ::close(fd);
}

void RdmaLane::join(const RdmaAddress& peer, LaneEnd theirs) {
  device_->connect(pair_, peer, theirs, psn_);
  theirs_ = theirs;
}

bool RdmaLane::post(verbs::Work* first) {
  verbs::Work* bad = nullptr;
  return verbs::post_send(pair_, first, &bad) == 0;
}

void RdmaLane::take_events() {
  const verbs::Library& verbs = device_->verbs_;
  verbs::CompletionQueue* queue;
  void* tag;
  while (verbs.get_cq_event(channel_, &queue, &tag) == 0) verbs.ack_cq_events(queue, 1);
}

}  // namespace mooncake
