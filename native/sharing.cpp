// SPDX-License-Identifier: Apache-2.0
#include "sharing.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <utility>

#include "tcp.h"

namespace mooncake {

namespace {

constexpr auto kRevocationTime = std::chrono::seconds(1);
constexpr auto kGreetingTime = std::chrono::seconds(5);
constexpr auto kLook = std::chrono::milliseconds(1000);  // for those who let it pass
constexpr size_t kMaxUngreeted = 256;

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

SharingSocket::~SharingSocket() { close_own(fd); }

bool SharingSocket::send(const SharingMessage& message, int descriptor) const {
  iovec part{const_cast<SharingMessage*>(&message), sizeof message};
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

static bool is_rights(const cmsghdr* item) { return item->cmsg_level == SOL_SOCKET && item->cmsg_type == SCM_RIGHTS; }

int SharingSocket::receive(SharingMessage& message, int& descriptor) const {
  iovec part{&message, sizeof message};
  msghdr header{};
  header.msg_iov = &part, header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  header.msg_control = control, header.msg_controllen = sizeof control;
  ssize_t count = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  for (cmsghdr* item = CMSG_FIRSTHDR(&header); count >= 0 && item; item = CMSG_NXTHDR(&header, item))
    for (size_t at = 0; is_rights(item) && CMSG_LEN(at + sizeof(int)) <= item->cmsg_len; at += sizeof(int)) {
      if (descriptor >= 0) ::close(descriptor);  // one at most is meant; alignment leaves room for a second
      std::memcpy(&descriptor, CMSG_DATA(item) + at, sizeof descriptor);
    }
  bool is_sound =
      count == sizeof message && message.magic == SharingMessage::kMagic && message.version == SharingMessage::kVersion;
  if (!is_sound && descriptor >= 0) ::close(descriptor), descriptor = -1;
  return is_sound ? 1 : -1;
}

SharingPeer::SharingPeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, SharingSocketRef socket,
                         int max_workers)
    : Peer(std::move(local), std::move(remote), max_workers), socket_(std::move(socket)) {}

SharingPeer::~SharingPeer() {
  // Ends the connection for the transport's thread too; in a forked child it is not ours to end.
  if (own_process()) shutdown(socket_->fd, SHUT_RDWR);
}

// Requests a region from the owner when its key is first used.
Status SharingPeer::find(uint64_t key, Clock::time_point deadline, const std::atomic<Status>* stop, Mapping& found) {
  std::unique_lock lock(mutex_);
  if (lost_) return Status::kPeerLost;
  auto [entry, is_new] = mappings_.try_emplace(key);
  if (is_new) {
    SharingMessage message;
    message.kind = SharingMessage::Kind::kGet, message.key = key;
    if (!socket_->send(message)) {
      mappings_.erase(entry);
      return Status::kPeerLost;
    }
  }
  while (true) {
    if (stop && stop->load() != Status::kOk) return stop->load();
    if (lost_) return Status::kPeerLost;
    auto asked = mappings_.find(key);
    if (asked == mappings_.end()) return Status::kAccessDenied;  // given and revoked meanwhile
    found = asked->second;
    if (found.is_answered) return found.region ? Status::kOk : found.status;
    if (answered_.wait_until(lock, deadline) == std::cv_status::timeout) return Status::kTimedOut;
  }
}

Status CopyingPeer::may_go_on(const Job& job, bool has_begun) const {
  if (Status stop = job.stop.load(); stop != Status::kOk) return stop;
  if (is_lost()) return Status::kPeerLost;
  return has_begun && job.is_late() ? Status::kTimedOut : Status::kOk;
}

// Takes slices, and parts of slices, for as long as they lie between the same two regions.
Status CopyingPeer::gather(Job& job, size_t& next, uint64_t& offset, Portion& portion) {
  uint64_t room = portion_bytes();
  portion.slices.clear();
  bool has_begun = false;  // the regions of this portion are chosen
  for (; next < job.request.slices.size() && room > 0; next++) {
    const Slice& slice = job.request.slices[next];
    if (slice.length == 0) {
      portion.slices.push_back({});
      continue;
    }
    bool is_same_key = portion.key == job.keys[next] && portion.mapping.region;
    bool is_same_local = !portion.regions.empty() && portion.regions[0]->contains(slice.local, slice.length);
    if (has_begun && !(is_same_key && is_same_local)) break;
    if (!is_same_key) {
      Status status = find(job.keys[next], job.request.deadline, &job.stop, portion.mapping);
      if (status != Status::kOk) return status;
      if (job.request.op == Op::kWrite && !portion.mapping.region->is_writable) return Status::kAccessDenied;
      portion.key = job.keys[next];
    }
    if (!is_same_key || !is_same_local) {
      auto covers = [&](const RegionRef& region) { return region->contains(slice.local, slice.length); };
      portion.regions = {*std::find_if(job.regions.begin(), job.regions.end(), covers), portion.mapping.region};
    }
    has_begun = true;
    uint64_t here;
    if (!portion.mapping.locate(slice.remote, slice.length, here)) return Status::kAccessDenied;
    uint64_t length = std::min(slice.length - offset, room);
    portion.slices.push_back({slice.local + offset, here + offset, length});
    room -= length, offset += length;
    if (offset < slice.length) break;
    offset = 0;
  }
  return Status::kOk;
}

Completion CopyingPeer::execute(Job& job) {
  Completion completion;
  Portion portion{job.request};
  for (const Slice& slice : job.request.slices) portion.job_bytes += slice.length;
  if (job.request.checksum) completion.checksums.assign(job.request.slices.size(), 0);
  uint64_t offset = 0;
  for (size_t next = 0; next < job.request.slices.size();) {
    size_t first = next;
    Status status = gather(job, next, offset, portion);
    if (status != Status::kOk) return job.failed(status, static_cast<int64_t>(next));
    if (portion.regions.empty()) break;  // nothing but empty slices
    portion.checksums = job.request.checksum ? &completion.checksums[first] : nullptr;
    status = may_go_on(job, first > 0 || offset > portion.slices[0].length);
    Touch touch(portion.regions);
    if (status == Status::kOk && !touch)
      status = portion.mapping.region->is_closed() ? Status::kAccessDenied : Status::kCancelled;
    Outcome outcome = status == Status::kOk ? copy(portion) : Outcome{status};
    if (outcome.status != Status::kOk) return job.failed(outcome.status, static_cast<int64_t>(first), outcome.error);
  }
  completion.num_bytes = portion.job_bytes;
  return completion;
}

bool SharingPeer::Mapping::locate(uint64_t address, uint64_t length, uint64_t& here) const {
  here = region->address + (address - base);
  return address >= base && region->contains(here, length);
}

void SharingPeer::given(const SharingMessage& message, int descriptor) {
  {
    std::lock_guard lock(mutex_);
    auto asked = mappings_.find(message.key);
    if (asked == mappings_.end() || asked->second.is_answered) {  // not requested: it would only cost memory
      if (descriptor >= 0) ::close(descriptor);
      return;
    }
  }
  Mapping mapping;
  if (message.status == static_cast<uint16_t>(Status::kOk)) mapping = map(message, descriptor);
  else if (descriptor >= 0) ::close(descriptor);
  mapping.is_answered = true;
  mapping.base = message.base;
  std::lock_guard lock(mutex_);
  mappings_[message.key] = std::move(mapping);
  answered_.notify_all();
}

// An owner revokes only what it gave, and after that: both are one connection's messages and come in order. So a
// key that was given is forgotten, since the owner denies it from now on. One that was asked for and not yet given
// is denied: its mapping must not come into use later. One that was not asked for leaves nothing here.
void SharingPeer::revoked(uint64_t key) {
  RegionRef region;
  {
    std::lock_guard lock(mutex_);
    auto asked = mappings_.find(key);
    if (asked != mappings_.end() && asked->second.is_answered) {
      region = std::move(asked->second.region);
      mappings_.erase(asked);
    } else if (asked != mappings_.end()) {
      asked->second.is_answered = true;
    }
    answered_.notify_all();
  }
  if (region) region->close();
  SharingMessage message;
  message.kind = SharingMessage::Kind::kRevoked, message.key = key;
  (void)socket_->send(message);
}

void SharingPeer::lost() {
  std::lock_guard lock(mutex_);
  lost_ = true;
  stop_all(Status::kPeerLost);
  mappings_.clear();  // or a dead process's pool would stay in memory for as long as we know its name
}

SharingTransport::SharingTransport(std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::string& endpoint)
    : regions_(std::move(regions)), epoch_(epoch), name_(endpoint) {
  char name[32];
  snprintf(name, sizeof name, "mooncake-%016llx", static_cast<unsigned long long>(random_key()));
  if (name_.empty()) name_ = name;
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
  leave_to_parent(listener_);
  for (int fd : {listener_, wakeup_}) {
    epoll_event event{};
    event.events = EPOLLIN, event.data.fd = fd;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
}

SharingTransport::~SharingTransport() {
  if (own_process_) assert(closing_);
}

void SharingTransport::start() {
  try {
    thread_ = std::make_unique<std::thread>([this] { serve(); });
  } catch (...) {  // the system gives no thread; the destructor does not run close()
    closing_ = true;
    close_descriptors();
    throw;
  }
}

// Set to -1, because their numbers go to the next files that this process opens.
void SharingTransport::close_descriptors() {
  for (int* fd : {&listener_, &epoll_, &wakeup_}) close_own(std::exchange(*fd, -1));
}

void SharingTransport::close() {
  if (!own_process_) {  // a forked child: the thread is not here
    (void)thread_.release();
    return;
  }
  if (closing_.exchange(true)) return;
  uint64_t one = 1;
  (void)!write(wakeup_, &one, sizeof one);
  thread_->join();
  close_descriptors();
}

std::shared_ptr<SharingPeer> SharingTransport::connect(const std::string& endpoint, uint64_t epoch,
                                                       std::vector<RemoteRegion> remote, Clock::time_point deadline,
                                                       Status& status) {
  status = Status::kPeerLost;
  if (closing_) return nullptr;
  sockaddr_un address{};
  socklen_t length = abstract_name(endpoint, address);
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return nullptr;
  auto link = std::make_unique<Link>();
  link->socket = std::make_shared<SharingSocket>(fd);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) return nullptr;
  if (!is_same_user(fd)) return status = Status::kAccessDenied, nullptr;
  SharingMessage message;
  message.epoch = epoch;
  if (!link->socket->send(message)) return nullptr;
  if (!wait_for(fd, POLLIN, deadline)) return status = Status::kTimedOut, nullptr;
  int descriptor = -1;
  if (link->socket->receive(message, descriptor) != 1) return nullptr;
  if (descriptor >= 0) ::close(descriptor);
  if (message.kind != SharingMessage::Kind::kWelcome || message.epoch != epoch) return nullptr;
  std::shared_ptr<SharingPeer> peer = make_peer(std::move(remote), link->socket);
  regions_->listen(peer);
  link->is_outbound = link->is_greeted = true;
  link->peer = peer;
  if (!watch(std::move(link))) return nullptr;
  status = Status::kOk;
  return peer;
}

// False: this transport was closed. The thread drops all links with the mutex held when it ends, so one that comes
// before is dropped, too.
bool SharingTransport::watch(std::unique_ptr<Link> link) {
  std::lock_guard lock(mutex_);
  if (closing_) return false;
  int fd = link->socket->fd;
  links_[fd] = std::move(link);
  epoll_event event{};
  event.events = EPOLLIN, event.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  return true;
}

void SharingTransport::serve() {
  epoll_event events[32];
  auto last_look = Clock::now();
  while (!closing_) {
    int count = epoll_wait(epoll_, events, 32, num_ungreeted_ ? static_cast<int>(kLook.count()) : -1);
    if (num_ungreeted_ && Clock::now() - last_look > kLook) {
      last_look = Clock::now();
      drop_ungreeted();
    }
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

void SharingTransport::accept_one() {
  int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE) usleep(10'000);
    return;
  }
  auto link = std::make_unique<Link>();
  link->socket = std::make_shared<SharingSocket>(fd);
  if (!is_same_user(fd) || num_ungreeted_ >= kMaxUngreeted) return;
  if (watch(std::move(link))) num_ungreeted_++;
}

// Clients that connect and send no greeting.
void SharingTransport::drop_ungreeted() {
  std::vector<Link*> overdue;
  {
    std::lock_guard lock(mutex_);
    for (auto& [fd, link] : links_)
      if (!link->is_greeted && Clock::now() - link->since > kGreetingTime) overdue.push_back(link.get());
  }
  for (Link* link : overdue) drop(link);
}

bool SharingTransport::handle(Link& link) {
  while (true) {
    SharingMessage message;
    int descriptor = -1;
    int result = link.socket->receive(message, descriptor);
    if (result <= 0) return result == 0;
    if (!link.is_outbound) {
      if (descriptor >= 0) ::close(descriptor);
      if (!serve_request(link, message)) return false;
      continue;
    }
    std::shared_ptr<SharingPeer> peer = link.peer.lock();
    bool is_gift = message.kind == SharingMessage::Kind::kGive;
    if (descriptor >= 0 && (!peer || !is_gift)) ::close(descriptor), descriptor = -1;
    if (!peer) return false;
    if (is_gift) peer->given(message, descriptor);
    else if (message.kind == SharingMessage::Kind::kRevoke) peer->revoked(message.key);
    else return false;
  }
}

bool SharingTransport::serve_request(Link& link, const SharingMessage& message) {
  std::lock_guard lock(mutex_);
  SharingMessage answer;
  answer.key = message.key;
  answer.epoch = message.epoch;  // the client's own: ours is not revealed
  switch (message.kind) {
    case SharingMessage::Kind::kHello:
      answer.kind = SharingMessage::Kind::kWelcome;
      if (message.epoch != epoch_) return false;
      if (!link.is_greeted) num_ungreeted_--;
      link.is_greeted = true;
      return link.socket->send(answer);
    case SharingMessage::Kind::kGet: {
      if (!link.is_greeted) return false;
      answer.kind = SharingMessage::Kind::kGive;
      RegionRef region = regions_->find_key(message.key);
      int descriptor = -1;
      if (!region || !show(*region, answer, descriptor)) {
        answer.status = static_cast<uint16_t>(Status::kAccessDenied);
        return link.socket->send(answer);
      }
      answer.base = region->address, answer.size = region->size;
      link.given.insert(message.key);
      return link.socket->send(answer, descriptor);
    }
    case SharingMessage::Kind::kRevoked:
      link.unrevoked.erase(message.key);
      revoked_.notify_all();
      return true;
    default:
      return false;
  }
}

void SharingTransport::drop(Link* link) {
  std::shared_ptr<SharingPeer> peer = link->peer.lock();
  std::unique_ptr<Link> owned;
  {
    std::lock_guard lock(mutex_);
    int fd = link->socket->fd;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    shutdown(fd, SHUT_RDWR);
    owned = std::move(links_[fd]);
    links_.erase(fd);
    if (!owned->is_greeted) num_ungreeted_--;
    revoked_.notify_all();
  }
  if (peer) peer->lost();
}

// Takes the region back from all peers that mapped it. One that does not confirm in time hangs or is
// malicious: the connection is cut, and when it wakes up it finds its peer lost.
void SharingTransport::region_closed(const Region& region) {
  if (!own_process_) return;
  std::unique_lock lock(mutex_);
  if (closing_) return;
  SharingMessage message;
  message.kind = SharingMessage::Kind::kRevoke, message.key = region.key;
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
