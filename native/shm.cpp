#include "shm.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>

#include "crc32c.h"
#include "tcp.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace mooncake {

namespace {

constexpr uint64_t kStep = 4 << 20;  // bytes copied between looks at stop and deadline
// Jobs from these sizes on are stored around the cache. Writes early: they go to a pool far bigger than
// any cache, where nobody looks at them soon. Reads late: whoever reads is about to use the bytes.
constexpr uint64_t kStreamingWrite = 1 << 20;
constexpr uint64_t kStreamingRead = 16 << 20;
constexpr uint64_t kLong = 32 << 10;    // streaming a shorter slice waits longer than it saves
constexpr uint64_t kFaultIn = 2 << 20;  // mapped at once when first touched
constexpr auto kRevocationTime = std::chrono::seconds(1);

socklen_t abstract_name(const std::string& name, sockaddr_un& address) {
  address.sun_family = AF_UNIX;
  address.sun_path[0] = '\0';
  size_t length = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

bool is_same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

}  // namespace

ShmSocket::~ShmSocket() { ::close(fd); }

bool ShmSocket::send(const ShmMessage& message, int descriptor) const {
  iovec part{const_cast<ShmMessage*>(&message), sizeof message};
  msghdr header{};
  header.msg_iov = &part, header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    header.msg_control = control, header.msg_controllen = sizeof control;
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET, item->cmsg_type = SCM_RIGHTS, item->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(item), &descriptor, sizeof descriptor);
  }
  return sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof message;
}

int ShmSocket::receive(ShmMessage& message, int& descriptor) const {
  iovec part{&message, sizeof message};
  msghdr header{};
  header.msg_iov = &part, header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  header.msg_control = control, header.msg_controllen = sizeof control;
  ssize_t count = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); count >= 0 && item; item = CMSG_NXTHDR(&header, item))
    if (item->cmsg_level == SOL_SOCKET && item->cmsg_type == SCM_RIGHTS)
      std::memcpy(&descriptor, CMSG_DATA(item), sizeof descriptor);
  bool is_sound = count == sizeof message && message.magic == ShmMessage::kMagic && message.version == 1;
  if (!is_sound && descriptor >= 0) ::close(descriptor), descriptor = -1;
  return is_sound ? 1 : -1;
}

ShmPeer::ShmPeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, ShmSocketRef socket)
    : Peer(std::move(local), std::move(remote), 1), socket_(std::move(socket)) {}

ShmPeer::~ShmPeer() {
  // Ends the connection for the transport's thread too; in a forked child it is not ours to end.
  if (own_process()) shutdown(socket_->fd, SHUT_RDWR);
}

// Asks the owner for a region the first time its key is used.
Status ShmPeer::find(uint64_t key, Clock::time_point deadline, const std::atomic<Status>* stop, Mapping& found) {
  std::unique_lock lock(mutex_);
  if (lost_) return Status::kPeerLost;
  auto [entry, is_new] = mappings_.try_emplace(key);
  if (is_new) {
    ShmMessage message;
    message.kind = ShmMessage::Kind::kGet, message.key = key;
    if (!socket_->send(message)) {
      mappings_.erase(entry);
      return Status::kPeerLost;
    }
  }
  while (true) {
    if (stop && stop->load() != Status::kOk) return stop->load();
    if (lost_) return Status::kPeerLost;
    found = mappings_[key];
    if (found.is_answered) return found.region ? Status::kOk : Status::kAccessDenied;
    if (answered_.wait_until(lock, deadline) == std::cv_status::timeout) return Status::kTimedOut;
  }
}

// Where there are no huge pages, a page fault per 4 KiB makes the first pass over a pool ten times as slow
// as the second. Asking for many pages at once costs a fifth of that, and asking to read them less than
// to write: the kernel maps shared memory writable either way, and reads it maps by the dozen.
void ShmPeer::Mapping::fault_in(uint64_t here, uint64_t length) const {
  for (uint64_t part = (here - region->address) / kFaultIn; part * kFaultIn < here - region->address + length; part++) {
    if ((*faulted_in)[part].exchange(true, std::memory_order_relaxed)) continue;
    auto* start = reinterpret_cast<uint8_t*>(region->address + part * kFaultIn);
    madvise(start, std::min(kFaultIn, region->size - part * kFaultIn), MADV_POPULATE_READ);
  }
}

Completion ShmPeer::execute(Job& job) {
  Completion completion;
  const Request& request = job.request;
  uint64_t total = 0;
  for (const Slice& slice : request.slices) total += slice.length;
  bool is_big = total >= (request.op == Op::kWrite ? kStreamingWrite : kStreamingRead);
  if (request.checksum) completion.checksums.assign(request.slices.size(), 0);
  Mapping mapping;
  uint64_t mapped_key = 0;
  std::vector<RegionRef> touched;
  for (size_t i = 0; i < request.slices.size(); i++) {
    const Slice& slice = request.slices[i];
    if (slice.length == 0) continue;
    if (mapped_key != job.keys[i]) {
      Status status = find(job.keys[i], request.deadline, &job.stop, mapping);
      if (status != Status::kOk) return job.failed(status, static_cast<int64_t>(i));
      mapped_key = job.keys[i];
      touched = job.regions;
      touched.push_back(mapping.region);
    }
    if (slice.remote < mapping.base ||
        !mapping.region->contains(mapping.region->address + (slice.remote - mapping.base), slice.length))
      return job.failed(Status::kAccessDenied, static_cast<int64_t>(i));
    auto* here = reinterpret_cast<uint8_t*>(slice.local);
    auto* there = reinterpret_cast<uint8_t*>(mapping.region->address + (slice.remote - mapping.base));
    auto* to = request.op == Op::kWrite ? there : here;
    auto* from = request.op == Op::kWrite ? here : there;
    bool streams = is_big && slice.length >= kLong;
    uint32_t crc = 0;
    for (uint64_t done = 0; done < slice.length;) {
      if (job.stop.load() != Status::kOk) return job.failed(job.stop.load(), static_cast<int64_t>(i));
      if (lost_) return job.failed(Status::kPeerLost, static_cast<int64_t>(i));
      if (done && job.is_late()) return job.failed(Status::kTimedOut, static_cast<int64_t>(i));
      Touch touch(touched);
      if (!touch)
        return job.failed(mapping.region->is_closed() ? Status::kAccessDenied : Status::kCancelled,
                          static_cast<int64_t>(i));
      uint64_t step = std::min(kStep, slice.length - done);
      mapping.fault_in(reinterpret_cast<uint64_t>(there) + done, step);
      if (request.checksum) crc = copy_crc32c(to + done, from + done, step, crc, streams);
      else copy(to + done, from + done, step, streams);
      done += step;
    }
    if (request.checksum) completion.checksums[i] = crc;
    completion.num_bytes += slice.length;
  }
  return completion;
}

RegionRef ShmPeer::view(uint64_t address, uint64_t length, Clock::time_point deadline, uint64_t& here) {
  std::optional<RemoteRegion> remote = remote_of(address, length);
  Mapping mapping;
  if (!remote || find(remote->key, deadline, nullptr, mapping) != Status::kOk) return nullptr;
  here = mapping.region->address + (address - mapping.base);
  if (address < mapping.base || !mapping.region->contains(here, length)) return nullptr;
  return mapping.region;
}

void ShmPeer::given(const ShmMessage& message, int descriptor) {
  RegionRef region;
  if (descriptor >= 0) region = map_shared(descriptor, message.size, message.key);
  Mapping mapping{true, region, message.base};
  if (region) mapping.faulted_in = std::make_shared<std::vector<std::atomic<bool>>>(region->size / kFaultIn + 1);
  std::lock_guard lock(mutex_);
  mappings_[message.key] = std::move(mapping);
  answered_.notify_all();
}

void ShmPeer::revoked(uint64_t key) {
  RegionRef region;
  {
    std::lock_guard lock(mutex_);
    Mapping& mapping = mappings_[key];
    region = std::move(mapping.region);
    mapping = {true};
    answered_.notify_all();
  }
  if (region) region->close();
  ShmMessage message;
  message.kind = ShmMessage::Kind::kRevoked, message.key = key;
  (void)socket_->send(message);
}

void ShmPeer::lost() {
  std::lock_guard lock(mutex_);
  lost_ = true;
  stop_all(Status::kPeerLost);
  mappings_.clear();  // or a dead process's pool would stay in memory for as long as we know its name
}

ShmTransport::ShmTransport(std::shared_ptr<RegionTable> regions, uint64_t epoch)
    : regions_(std::move(regions)), epoch_(epoch) {
  char name[32];
  snprintf(name, sizeof name, "mooncake-%016llx", static_cast<unsigned long long>(random_key()));
  name_ = name;
  sockaddr_un address{};
  socklen_t length = abstract_name(name_, address);
  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wakeup_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (listener_ < 0 || epoll_ < 0 || wakeup_ < 0 ||
      bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener_, 512) != 0) {
    int error = errno;
    for (int fd : {listener_, epoll_, wakeup_})
      if (fd >= 0) ::close(fd);
    throw std::system_error(error, std::generic_category(), "shared memory socket");
  }
  for (int fd : {listener_, wakeup_}) {
    epoll_event event{};
    event.events = EPOLLIN, event.data.fd = fd;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
  thread_ = std::make_unique<std::thread>([this] { serve(); });
}

ShmTransport::~ShmTransport() { close(); }

void ShmTransport::close() {
  if (!own_process_) {  // a forked child: the thread is not here
    (void)thread_.release();
    return;
  }
  if (closing_.exchange(true)) return;
  uint64_t one = 1;
  (void)!write(wakeup_, &one, sizeof one);
  thread_->join();
  ::close(listener_);
  ::close(epoll_);
  ::close(wakeup_);
}

std::shared_ptr<ShmPeer> ShmTransport::connect(const std::string& endpoint, uint64_t epoch,
                                               std::vector<RemoteRegion> remote, Clock::time_point deadline,
                                               Status& status) {
  status = Status::kPeerLost;
  sockaddr_un address{};
  socklen_t length = abstract_name(endpoint, address);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return nullptr;
  auto link = std::make_unique<Link>();
  link->socket = std::make_shared<ShmSocket>(fd);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) return nullptr;
  if (!is_same_user(fd)) return status = Status::kAccessDenied, nullptr;
  ShmMessage message;
  message.epoch = epoch;
  if (!link->socket->send(message)) return nullptr;
  if (!wait_for(fd, POLLIN, deadline)) return status = Status::kTimedOut, nullptr;
  int descriptor = -1;
  if (link->socket->receive(message, descriptor) != 1) return nullptr;
  if (descriptor >= 0) ::close(descriptor);
  if (message.kind != ShmMessage::Kind::kWelcome || message.epoch != epoch) return nullptr;
  auto peer = std::make_shared<ShmPeer>(regions_, std::move(remote), link->socket);
  regions_->listen(peer);
  link->is_outbound = link->is_greeted = true;
  link->peer = peer;
  watch(std::move(link));
  status = Status::kOk;
  return peer;
}

void ShmTransport::watch(std::unique_ptr<Link> link) {
  std::lock_guard lock(mutex_);
  int fd = link->socket->fd;
  links_[fd] = std::move(link);
  epoll_event event{};
  event.events = EPOLLIN, event.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void ShmTransport::serve() {
  epoll_event events[32];
  while (!closing_) {
    int count = epoll_wait(epoll_, events, 32, -1);
    for (int i = 0; i < count; i++) {
      int fd = events[i].data.fd;
      if (fd == wakeup_) continue;
      if (fd == listener_) {
        accept_one();
        continue;
      }
      Link* link;
      {
        std::lock_guard lock(mutex_);
        auto found = links_.find(fd);
        if (found == links_.end()) continue;
        link = found->second.get();
      }
      if (!handle(*link)) drop(link);  // only this thread removes links, so the pointer stays good
    }
  }
  std::vector<Link*> rest;
  {
    std::lock_guard lock(mutex_);
    for (auto& [fd, link] : links_) rest.push_back(link.get());
  }
  for (Link* link : rest) drop(link);
}

void ShmTransport::accept_one() {
  int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE) usleep(10'000);
    return;
  }
  auto link = std::make_unique<Link>();
  link->socket = std::make_shared<ShmSocket>(fd);
  if (is_same_user(fd)) watch(std::move(link));
}

bool ShmTransport::handle(Link& link) {
  while (true) {
    ShmMessage message;
    int descriptor = -1;
    int result = link.socket->receive(message, descriptor);
    if (result <= 0) return result == 0;
    if (!link.is_outbound) {
      if (descriptor >= 0) ::close(descriptor);
      if (!serve_request(link, message)) return false;
      continue;
    }
    std::shared_ptr<ShmPeer> peer = link.peer.lock();
    bool is_gift = message.kind == ShmMessage::Kind::kGive;
    if (descriptor >= 0 && (!peer || !is_gift)) ::close(descriptor), descriptor = -1;
    if (!peer) return false;
    if (is_gift) peer->given(message, descriptor);
    else if (message.kind == ShmMessage::Kind::kRevoke) peer->revoked(message.key);
    else return false;
  }
}

bool ShmTransport::serve_request(Link& link, const ShmMessage& message) {
  std::lock_guard lock(mutex_);
  ShmMessage answer;
  answer.key = message.key;
  answer.epoch = message.epoch;  // ours is told to nobody who does not know it
  switch (message.kind) {
    case ShmMessage::Kind::kHello:
      answer.kind = ShmMessage::Kind::kWelcome;
      link.is_greeted = message.epoch == epoch_;
      return link.is_greeted && link.socket->send(answer);
    case ShmMessage::Kind::kGet: {
      if (!link.is_greeted) return false;
      answer.kind = ShmMessage::Kind::kGive;
      RegionRef region = regions_->find_key(message.key);
      if (!region || !region->is_shared()) {
        answer.status = static_cast<uint16_t>(Status::kAccessDenied);
        return link.socket->send(answer);
      }
      answer.base = region->address, answer.size = region->size;
      link.given.insert(message.key);
      return link.socket->send(answer, region->fd);
    }
    case ShmMessage::Kind::kRevoked:
      link.unrevoked.erase(message.key);
      revoked_.notify_all();
      return true;
    default:
      return false;
  }
}

void ShmTransport::drop(Link* link) {
  std::shared_ptr<ShmPeer> peer = link->peer.lock();
  std::unique_ptr<Link> owned;
  {
    std::lock_guard lock(mutex_);
    int fd = link->socket->fd;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    shutdown(fd, SHUT_RDWR);
    owned = std::move(links_[fd]);
    links_.erase(fd);
    revoked_.notify_all();
  }
  if (peer) peer->lost();
}

// Takes the region back from everyone who mapped it. Whoever does not confirm in time hangs or is
// malicious: the connection is cut, and when it wakes up it finds its peer lost.
void ShmTransport::region_closed(const Region& region) {
  std::unique_lock lock(mutex_);
  if (closing_ || !region.is_shared()) return;
  ShmMessage message;
  message.kind = ShmMessage::Kind::kRevoke, message.key = region.key;
  for (auto& [fd, link] : links_) {
    if (!link->given.erase(region.key)) continue;
    link->unrevoked.insert(region.key);
    if (!link->socket->send(message)) shutdown(fd, SHUT_RDWR);
  }
  auto is_back = [&] {
    return closing_ || std::none_of(links_.begin(), links_.end(),
                                    [&](auto& entry) { return entry.second->unrevoked.contains(region.key); });
  };
  if (revoked_.wait_for(lock, kRevocationTime, is_back)) return;
  for (auto& [fd, link] : links_)
    if (link->unrevoked.contains(region.key)) shutdown(fd, SHUT_RDWR);
}

}  // namespace mooncake
