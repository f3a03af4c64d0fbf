// SPDX-License-Identifier: Apache-2.0
#include "tcp.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crc32c.h"

// The client's side: a job is cut into frames, frames go to whichever lane can take one, and one
// thread drives all lanes of its job with non-blocking calls and poll().

namespace mooncake {

namespace {

constexpr uint64_t kFrameBytes = 1 << 20;   // payload after which a frame is closed
constexpr uint64_t kWindowBytes = 8 << 20;  // requested or sent on a lane and not yet answered
constexpr uint64_t kLaneBytes = 1 << 20;    // a job takes one lane per so many bytes
constexpr size_t kReceiveBuffer = 8 << 10;
constexpr size_t kMaxVector = 128;
constexpr size_t kInCache = 256 << 10;  // checksummed bytes per system call
// On loopback the kernel would let megabytes pile up between sender and receiver; what is in flight then
// falls out of the second-level cache and costs half as much again to move (measured: 0.21 instead of
// 0.35 s of processor per GB). Over a real network the kernel's own choice stays.
constexpr int kLoopbackBuffer = 160 << 10;
constexpr size_t kSpareLanes = 3;  // connections beyond num_streams, so that small jobs need not queue

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

// A part of a slice that travels in one frame.
struct Piece {
  size_t slice;
  uint64_t offset;
  uint64_t length;
};

struct InFlight {
  uint64_t number = 0;
  uint64_t num_bytes = 0;
  std::vector<Piece> pieces;
};

// Cuts the slices of a job into frames.
class Cutter {
 public:
  explicit Cutter(const Job& job) : job_(job) { skip_empty(); }
  bool done() const { return slice_ == job_.request.slices.size(); }
  void cut(InFlight& frame) {
    const auto& slices = job_.request.slices;
    while (!done() && frame.num_bytes < kFrameBytes && frame.pieces.size() < wire::kMaxSlices) {
      uint64_t length = std::min(slices[slice_].length - offset_, kFrameBytes - frame.num_bytes);
      frame.pieces.push_back({slice_, offset_, length});
      frame.num_bytes += length;
      offset_ += length;
      if (offset_ == slices[slice_].length) slice_++, offset_ = 0, skip_empty();
    }
  }

 private:
  void skip_empty() {
    while (!done() && job_.request.slices[slice_].length == 0) slice_++;
  }
  const Job& job_;
  size_t slice_ = 0;
  uint64_t offset_ = 0;
};

// Iterates over the pieces of a frame as their bytes move, and checksums them while they are in cache.
class Walker {
 public:
  void begin(const Job& job, const std::vector<Piece>& pieces) {
    job_ = &job, pieces_ = &pieces, at_ = 0, done_ = 0, crc_ = 0;
    extents.clear();
    for (const Piece& piece : pieces)
      extents.add(reinterpret_cast<void*>(job.request.slices[piece.slice].local + piece.offset), piece.length);
  }
  void moved(uint64_t num_bytes, Checksums& sums) {
    extents.consume(num_bytes);
    if (!job_->request.checksum) return;
    while (num_bytes > 0) {
      const Piece& piece = (*pieces_)[at_];
      uint64_t step = std::min(num_bytes, piece.length - done_);
      auto* bytes = reinterpret_cast<const uint8_t*>(job_->request.slices[piece.slice].local + piece.offset + done_);
      crc_ = crc32c(bytes, step, crc_);
      done_ += step, num_bytes -= step;
      if (done_ == piece.length) {
        sums.add(piece.slice, piece.offset, piece.length, crc_);
        at_++, done_ = 0, crc_ = 0;
      }
    }
  }
  Extents extents;

 private:
  const Job* job_ = nullptr;
  const std::vector<Piece>* pieces_ = nullptr;
  size_t at_ = 0;
  uint64_t done_ = 0;
  uint32_t crc_ = 0;
};

// One lane at work for one job.
struct Lane {
  Channel& channel;
  std::deque<InFlight> in_flight{};  // oldest first; the replies come in this order
  uint64_t in_flight_bytes = 0;
  std::vector<uint8_t> head{};  // frame and slice table being sent
  size_t head_sent = 0;
  Walker sending{};
  bool is_blocked = false;  // the last send took less than offered
  std::unique_ptr<uint8_t[]> buffer = std::make_unique_for_overwrite<uint8_t[]>(kReceiveBuffer);
  size_t begin = 0, end = 0;
  bool in_payload = false;  // of the read reply to in_flight.front()
  Walker receiving{};
  std::vector<iovec> vector{};

  explicit Lane(Channel& channel) : channel(channel) {}
  bool has_to_send() const { return head_sent < head.size() || sending.extents.bytes() > 0; }
};

class Conversation {
 public:
  Conversation(Job& job, const std::vector<Channel*>& channels) : job_(job), cutter_(job) {
    for (Channel* channel : channels) lanes_.emplace_back(*channel);
  }

  // Moves everything. True: all requests are answered and the lanes are clean, though the peer may
  // have refused some (status()). False: the lanes can no longer be used.
  bool drive() {
    while (true) {
      for (bool again = true; again;) {  // one frame per lane in turn, so that lanes share the job
        again = false;
        for (Lane& lane : lanes_) {
          if (!send(lane)) return false;
          again |= can_send(lane);
        }
      }
      if (is_finished()) return true;
      if (!wait()) return false;
    }
  }

  Status status() const { return status_; }
  int64_t failed_slice() const { return failed_slice_; }
  int error() const { return error_; }
  Checksums sums;

 private:
  bool fail(Status status) { return status_ = status, false; }
  bool wants_frame(const Lane& lane) const {
    return status_ == Status::kOk && !cutter_.done() && lane.in_flight_bytes < kWindowBytes;
  }
  bool can_send(const Lane& lane) const { return !lane.is_blocked && (lane.has_to_send() || wants_frame(lane)); }
  bool is_finished() const {
    if (status_ == Status::kOk && !cutter_.done()) return false;
    return std::all_of(lanes_.begin(), lanes_.end(),
                       [](const Lane& lane) { return lane.in_flight.empty() && !lane.has_to_send(); });
  }

  void open_frame(Lane& lane) {
    InFlight& next = lane.in_flight.emplace_back();
    next.number = ++last_number_;
    cutter_.cut(next);
    lane.in_flight_bytes += next.num_bytes;
    wire::Frame frame;
    frame.kind = job_.request.op == Op::kWrite ? wire::Kind::kWrite : wire::Kind::kRead;
    frame.num_slices = static_cast<uint32_t>(next.pieces.size());
    frame.number = next.number;
    frame.payload_bytes = next.num_bytes;
    lane.head.resize(sizeof frame + next.pieces.size() * sizeof(wire::WireSlice));
    lane.head_sent = 0;
    uint8_t* at = lane.head.data();
    std::memcpy(at, &frame, sizeof frame);
    at += sizeof frame;
    for (const Piece& piece : next.pieces) {
      wire::WireSlice slice{job_.request.slices[piece.slice].remote + piece.offset, piece.length,
                            job_.keys[piece.slice]};
      std::memcpy(at, &slice, sizeof slice);
      at += sizeof slice;
    }
    if (job_.request.op == Op::kWrite) lane.sending.begin(job_, next.pieces);
  }

  // Sends up to the end of a frame.
  bool send(Lane& lane) {
    if (!can_send(lane)) return true;
    if (!lane.has_to_send()) open_frame(lane);
    while (lane.has_to_send()) {
      lane.sending.extents.fill(lane.vector, kMaxVector, job_.request.checksum ? kInCache : SIZE_MAX);
      if (size_t rest = lane.head.size() - lane.head_sent)
        lane.vector.insert(lane.vector.begin(), {lane.head.data() + lane.head_sent, rest});
      size_t offered = 0;
      for (const iovec& extent : lane.vector) offered += extent.iov_len;
      Touch touch(job_.regions);
      if (!touch) return fail(Status::kCancelled);
      ssize_t sent = lane.channel.send(lane.vector);
      if (sent < 0 && !would_block()) return fail(Status::kPeerLost);
      auto count = static_cast<size_t>(std::max<ssize_t>(sent, 0));
      lane.is_blocked = count < offered;
      size_t of_head = std::min(count, lane.head.size() - lane.head_sent);
      lane.head_sent += of_head;
      if (count > of_head) lane.sending.moved(count - of_head, sums);
      if (lane.is_blocked) break;
    }
    return true;
  }

  bool wait() {
    polls_.clear();
    for (const Lane& lane : lanes_) {
      bool sends = lane.is_blocked && (lane.has_to_send() || wants_frame(lane));
      polls_.push_back({lane.channel.socket(), static_cast<short>(POLLIN | (sends ? POLLOUT : 0)), 0});
    }
    if (job_.stop.load() != Status::kOk) return fail(job_.stop.load());
    // The answer to a small request is quicker than going to sleep and being woken on an idle core.
    int count = 0;
    auto look_until = Clock::now() + kAttentive;
    do {
      count = poll(polls_.data(), polls_.size(), 0);
      if (count == 0) sched_yield();
    } while (count == 0 && Clock::now() < look_until);
    if (count == 0) count = poll(polls_.data(), polls_.size(), milliseconds_until(job_.request.deadline));
    if (job_.stop.load() != Status::kOk) return fail(job_.stop.load());
    if (count == 0 && job_.is_late()) return fail(Status::kTimedOut);
    for (size_t i = 0; i < polls_.size(); i++) {
      if (polls_[i].revents & POLLOUT) lanes_[i].is_blocked = false;
      if (polls_[i].revents & ~POLLOUT && !receive(lanes_[i])) return false;
    }
    return true;
  }

  // Takes what has arrived on a lane.
  bool receive(Lane& lane) {
    if (lane.in_flight.empty()) return fail(Status::kPeerLost);  // nothing is due: the peer closed
    bool has_drained = false;
    while (true) {
      bool goes_on = true;
      if (lane.in_payload ? !take_buffered(lane, goes_on) : !take_reply(lane, goes_on)) return false;
      if (goes_on) continue;
      if (lane.in_flight.empty()) return lane.begin == lane.end || fail(Status::kProtocolError);
      if (has_drained) return true;
      std::memmove(lane.buffer.get(), lane.buffer.get() + lane.begin, lane.end - lane.begin);
      lane.end -= lane.begin, lane.begin = 0;
      lane.vector.clear();
      size_t payload = lane.in_payload ? lane.receiving.extents.bytes() : 0, wanted = 0;
      if (payload) lane.receiving.extents.fill(lane.vector, kMaxVector, job_.request.checksum ? kInCache : SIZE_MAX);
      for (const iovec& extent : lane.vector) wanted += extent.iov_len;
      if (wanted == payload) {
        lane.vector.push_back({lane.buffer.get() + lane.end, kReceiveBuffer - lane.end});
        wanted += kReceiveBuffer - lane.end;
      }
      Touch touch(job_.regions);
      if (!touch) return fail(Status::kCancelled);
      ssize_t received = lane.channel.receive(lane.vector, wanted, has_drained);
      if (received < 0 && would_block()) return true;
      if (received <= 0) return fail(Status::kPeerLost);
      auto count = static_cast<size_t>(received);
      size_t placed = std::min(count, payload);
      if (placed) lane.receiving.moved(placed, sums);
      lane.end += count - placed;
    }
  }

  // One reply from the buffer; `goes_on` is false when its bytes are not all there.
  bool take_reply(Lane& lane, bool& goes_on) {
    wire::Frame reply;
    goes_on = lane.end - lane.begin >= sizeof reply && !lane.in_flight.empty();
    if (!goes_on) return true;
    std::memcpy(&reply, lane.buffer.get() + lane.begin, sizeof reply);
    lane.begin += sizeof reply;
    const InFlight& request = lane.in_flight.front();
    bool is_half_sent = lane.in_flight.size() == 1 && lane.has_to_send();
    if (!wire::is_reply(reply) || reply.number != request.number || is_half_sent) return fail(Status::kProtocolError);
    auto status = static_cast<Status>(reply.status);
    bool brings_bytes = status == Status::kOk && job_.request.op == Op::kRead;
    if (reply.payload_bytes != (brings_bytes ? request.num_bytes : 0)) return fail(Status::kProtocolError);
    if (status != Status::kOk && status_ == Status::kOk) {
      status_ = status, error_ = reply.error;
      if (reply.failed_slice < request.pieces.size())
        failed_slice_ = static_cast<int64_t>(request.pieces[reply.failed_slice].slice);
    }
    if (brings_bytes) {
      lane.receiving.begin(job_, request.pieces);
      lane.in_payload = true;
    } else {
      finish_oldest(lane);
    }
    return true;
  }

  // Payload that came along with a reply's header.
  bool take_buffered(Lane& lane, bool& goes_on) {
    Touch touch(job_.regions);
    if (!touch) return fail(Status::kCancelled);
    while (lane.begin < lane.end && lane.receiving.extents.bytes() > 0) {
      lane.receiving.extents.fill(lane.vector, 1);
      size_t step = std::min(lane.vector[0].iov_len, lane.end - lane.begin);
      std::memcpy(lane.vector[0].iov_base, lane.buffer.get() + lane.begin, step);
      lane.begin += step;
      lane.receiving.moved(step, sums);
    }
    goes_on = lane.receiving.extents.bytes() == 0;
    if (goes_on) finish_oldest(lane);
    return true;
  }

  void finish_oldest(Lane& lane) {
    lane.in_payload = false;
    lane.in_flight_bytes -= lane.in_flight.front().num_bytes;
    lane.in_flight.pop_front();
  }

  Job& job_;
  Cutter cutter_;
  std::deque<Lane> lanes_;
  std::vector<pollfd> polls_;
  uint64_t last_number_ = 0;
  Status status_ = Status::kOk;
  int64_t failed_slice_ = -1;
  int error_ = 0;
};

}  // namespace

std::optional<TcpAddress> TcpAddress::parse(const std::string& host, int port) {
  TcpAddress address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET, v4->sin_port = htons(static_cast<uint16_t>(port)), address.length = sizeof *v4;
  } else if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6, v6->sin6_port = htons(static_cast<uint16_t>(port)), address.length = sizeof *v6;
  } else {
    return std::nullopt;
  }
  return address;
}

std::string TcpAddress::host() const {
  char text[INET6_ADDRSTRLEN] = {};
  const void* bytes = &reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr;
  if (storage.ss_family == AF_INET6) bytes = &reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  inet_ntop(storage.ss_family, bytes, text, sizeof text);
  return text;
}

int milliseconds_until(Clock::time_point deadline) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

namespace {

// Both ends have the same address, so they share a host and its caches.
bool is_loopback(int socket) {
  sockaddr_storage ours{}, theirs{};
  socklen_t our_length = sizeof ours, their_length = sizeof theirs;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&ours), &our_length) != 0 ||
      getpeername(socket, reinterpret_cast<sockaddr*>(&theirs), &their_length) != 0 ||
      ours.ss_family != theirs.ss_family)
    return false;
  if (ours.ss_family == AF_INET)
    return reinterpret_cast<sockaddr_in&>(ours).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in&>(theirs).sin_addr.s_addr;
  return std::memcmp(&reinterpret_cast<sockaddr_in6&>(ours).sin6_addr,
                     &reinterpret_cast<sockaddr_in6&>(theirs).sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

void tune(int socket) {
  int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (is_loopback(socket)) setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kLoopbackBuffer, sizeof kLoopbackBuffer);
}

namespace {

std::mutex fences_mutex;
std::unordered_map<uint64_t, std::shared_ptr<Fences>>& fences_by_epoch() {
  static auto* known = new std::unordered_map<uint64_t, std::shared_ptr<Fences>>();  // outlives every peer
  return *known;
}

}  // namespace

std::shared_ptr<Fences> Fences::to(uint64_t epoch) {
  std::lock_guard lock(fences_mutex);
  std::shared_ptr<Fences>& fences = fences_by_epoch()[epoch];
  if (!fences) fences = std::make_shared<Fences>();
  return fences;
}

// What is still pending is kept for the next peer object that leads there.
void Fences::release(uint64_t epoch, std::shared_ptr<Fences>& fences) {
  std::lock_guard lock(fences_mutex);
  fences.reset();
  auto found = fences_by_epoch().find(epoch);
  if (found != fences_by_epoch().end() && found->second.use_count() == 1 && found->second->pending().empty())
    fences_by_epoch().erase(found);
}

void Fences::add(const std::vector<uint64_t>& lanes) {
  std::lock_guard lock(mutex_);
  pending_.insert(pending_.end(), lanes.begin(), lanes.end());
}

std::vector<uint64_t> Fences::pending() const {
  std::lock_guard lock(mutex_);
  return pending_;
}

void Fences::remove(const std::vector<uint64_t>& lanes) {
  std::lock_guard lock(mutex_);
  std::erase_if(pending_, [&](uint64_t lane) { return std::find(lanes.begin(), lanes.end(), lane) != lanes.end(); });
}

TcpPeer::TcpPeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, TcpAddress address,
                 uint64_t epoch, int num_streams, std::optional<TcpAddress> source, std::shared_ptr<TlsContext> tls)
    : Peer(std::move(local), std::move(remote), std::max(2, num_streams)),
      address_(address),
      source_(source),
      epoch_(epoch),
      num_streams_(static_cast<size_t>(num_streams)),
      tls_(std::move(tls)),
      fences_(Fences::to(epoch)) {}

TcpPeer::~TcpPeer() {
  TcpPeer::release();
  Fences::release(epoch_, fences_);
}

void TcpPeer::release() {
  num_lanes_ -= idle_.size();
  idle_.clear();
}

Completion TcpPeer::execute(Job& job) {
  uint64_t num_bytes = 0;
  for (const Slice& slice : job.request.slices) num_bytes += slice.length;
  std::vector<Lane> lanes;
  size_t wanted = std::clamp<size_t>(num_bytes / kLaneBytes, 1, num_streams_);
  if (Status status = take_lanes(job, wanted, lanes); status != Status::kOk) {
    Completion completion = job.failed(status);
    std::lock_guard lock(mutex_);
    if (status == Status::kPeerLost || status == Status::kProtocolError) completion.reason = reason_;
    return completion;
  }
  std::vector<Channel*> channels;
  for (const Lane& lane : lanes) channels.push_back(lane.channel.get());
  Conversation conversation(job, channels);
  Status fenced = fence(job, lanes[0]);
  bool is_clean = fenced == Status::kOk && conversation.drive();
  {
    std::lock_guard lock(mutex_);
    std::vector<uint64_t> given_up;
    for (Lane& lane : lanes) {
      std::erase(job.sockets, lane.channel->socket());
      if (is_clean && job.stop.load() == Status::kOk) {
        idle_.push_back(std::move(lane));
      } else {
        lane.channel.reset();
        num_lanes_--;
        given_up.push_back(lane.name);
      }
    }
    if (fenced == Status::kOk && !is_clean && job.request.op == Op::kWrite) fences_->add(given_up);
    freed_.notify_all();
  }
  Status status = fenced == Status::kOk ? conversation.status() : fenced;
  if (!is_clean && job.stop.load() != Status::kOk) status = job.stop.load();
  if (status != Status::kOk) return job.failed(status, conversation.failed_slice(), conversation.error());
  Completion completion;
  completion.num_bytes = num_bytes;
  if (job.request.checksum) completion.checksums = conversation.sums.per_slice(job.request.slices.size());
  return completion;
}

// At least one lane, up to `wanted`: idle ones, else new ones, else whichever is given back first.
Status TcpPeer::take_lanes(Job& job, size_t wanted, std::vector<Lane>& lanes) {
  std::unique_lock lock(mutex_);
  while (lanes.size() < wanted) {
    if (job.stop.load() != Status::kOk) break;
    if (!idle_.empty()) {
      Lane lane = std::move(idle_.back());
      idle_.pop_back();
      if (lane.channel->is_quiet()) {
        job.sockets.push_back(lane.channel->socket());
        lanes.push_back(std::move(lane));
      } else {  // the peer closed it meanwhile
        num_lanes_--;
      }
      continue;
    }
    if (num_lanes_ < num_streams_ + kSpareLanes) {
      num_lanes_++;
      lock.unlock();
      Lane lane{nullptr, random_key()};
      Status status = connect(job, lane);
      lock.lock();
      if (status != Status::kOk) {
        num_lanes_--;
        freed_.notify_all();
        if (!lanes.empty()) break;
        return job.stop.load() == Status::kOk ? status : job.stop.load();
      }
      lanes.push_back(std::move(lane));
      continue;
    }
    if (!lanes.empty()) break;
    if (freed_.wait_until(lock, job.request.deadline) == std::cv_status::timeout && job.is_late())
      return Status::kTimedOut;
  }
  if (lanes.empty()) return job.stop.load();
  return Status::kOk;
}

// A new lane, attached to the job.
Status TcpPeer::connect(Job& job, Lane& lane) {
  int socket = ::socket(address_.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket < 0) return fail_greeting(Status::kPeerLost, std::string("no socket: ") + std::strerror(errno));
  lane.channel = std::make_unique<Channel>(socket);
  Status status = attach(job, socket) ? Status::kOk : job.stop.load();
  if (status == Status::kOk) {
    auto* name = reinterpret_cast<const sockaddr*>(&address_.storage);
    if (source_ && bind(socket, reinterpret_cast<const sockaddr*>(&source_->storage), source_->length) != 0)
      status = fail_greeting(Status::kPeerLost, std::string("the rail's own address is gone: ") + std::strerror(errno));
    else if (::connect(socket, name, address_.length) != 0 && errno != EINPROGRESS)
      status = fail_greeting(Status::kPeerLost, std::string("connecting failed: ") + std::strerror(errno));
    else status = greet(job, lane);
  }
  if (status != Status::kOk) {
    detach(job, socket);
    lane.channel.reset();
  }
  return status;
}

Status TcpPeer::fail_greeting(Status status, std::string reason) {
  std::lock_guard lock(mutex_);
  reason_ = std::move(reason);
  return status;
}

int wait_for(int socket, short events, Clock::time_point deadline) {
  pollfd entry{socket, events, 0};
  while (true) {
    int count = poll(&entry, 1, milliseconds_until(deadline));
    if (count > 0) return entry.revents;
    if (count == 0 && Clock::now() >= deadline) return 0;
  }
}

namespace {

// 0 when all is there, else what the last receive() said: 0 bytes is the end.
Status receive_exactly(Channel& channel, void* into, size_t size, Clock::time_point deadline) {
  size_t received = 0;
  std::vector<iovec> rest(1);
  while (received < size) {
    rest[0] = {static_cast<uint8_t*>(into) + received, size - received};
    bool is_drained = false;
    ssize_t count = channel.receive(rest, rest[0].iov_len, is_drained);
    if (count < 0 && would_block()) {
      if (!wait_for(channel.socket(), POLLIN, deadline)) return Status::kTimedOut;
      continue;
    }
    if (count <= 0) return Status::kPeerLost;
    received += static_cast<size_t>(count);
  }
  return Status::kOk;
}

// A message that fits a quiet socket's buffer, so that less than all of it means that the peer is gone.
bool send_whole(Channel& channel, const void* bytes, size_t size) {
  size_t sent = 0;
  std::vector<iovec> rest(1);
  while (sent < size) {
    rest[0] = {static_cast<uint8_t*>(const_cast<void*>(bytes)) + sent, size - sent};
    ssize_t count = channel.send(rest);
    if (count <= 0) return false;
    sent += static_cast<size_t>(count);
  }
  return true;
}

int error_of(int socket) {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

const char* kOtherTls = "use the same `tls` setting on both sides";

std::string words_of(const wire::Hello& answer) {
  switch (answer.refusal) {
    case wire::Refusal::kOtherProcess:
      return "another process has this address now; open the peer's current descriptor";
    case wire::Refusal::kWantsTls:
      return std::string("the peer takes data over TLS only and we sent it plain; ") + kOtherTls;
    case wire::Refusal::kHasNoTls:
      return std::string("the peer takes plain data only and we asked for TLS; ") + kOtherTls;
    default:
      return "the peer refuses us for a reason unknown to this version (" +
             std::to_string(static_cast<int>(answer.refusal)) + "); install the same version on both sides";
  }
}

}  // namespace

// The server's answer to a greeting. kProtocolError: it is none of this version, and the reason is noted.
Status TcpPeer::receive_answer(Job& job, Lane& lane, wire::Hello& answer) {
  Status received = receive_exactly(*lane.channel, &answer, offsetof(wire::Hello, epoch), job.request.deadline);
  if (received != Status::kOk) return received;
  if (wire::is_hello_of_other_version(answer))
    return fail_greeting(Status::kProtocolError, "the peer speaks version " + std::to_string(answer.version) +
                                                     " of the data protocol and we " + std::to_string(wire::kVersion) +
                                                     "; install the same version on both sides");
  if (!wire::is_hello(answer))
    return fail_greeting(Status::kProtocolError, "something other than a transfer engine answers at this address");
  size_t head = offsetof(wire::Hello, epoch);
  return receive_exactly(*lane.channel, reinterpret_cast<uint8_t*>(&answer) + head, sizeof answer - head,
                         job.request.deadline);
}

// TLS on a connected socket. A server that has none answers in the plain. That is seen by the first byte of its
// answer, before which OpenSSL must read nothing: it would take a part of the answer and give no reason.
Status TcpPeer::encrypt(Job& job, Lane& lane) {
  int socket = lane.channel->socket();
  std::unique_ptr<TlsSession> session = tls_->session(socket, false, address_.host());
  bool has_looked = false;
  session->allow_reads(false);
  while (true) {
    TlsSession::Step step = session->handshake();
    if (step == TlsSession::Step::kDone) {
      lane.channel->encrypt(std::move(session));
      return Status::kOk;
    }
    if (step == TlsSession::Step::kWantsWrite) {
      if (!wait_for(socket, POLLOUT, job.request.deadline)) return Status::kTimedOut;
      continue;
    }
    if (step == TlsSession::Step::kWantsRead && !wait_for(socket, POLLIN, job.request.deadline))
      return Status::kTimedOut;
    if (!has_looked) {
      uint8_t first = 0;
      ssize_t count = recv(socket, &first, sizeof first, MSG_PEEK | MSG_DONTWAIT);
      if (count == 1 && first == static_cast<uint8_t>(wire::kMagic)) {
        wire::Hello answer;
        Status received = receive_answer(job, lane, answer);
        if (received == Status::kOk) return fail_greeting(Status::kProtocolError, words_of(answer));
        if (received != Status::kPeerLost || job.stop.load() != Status::kOk) return received;
        return fail_greeting(Status::kPeerLost, "the peer closed the connection during the greeting");
      }
      has_looked = count >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
      session->allow_reads(has_looked);
    }
    if (step == TlsSession::Step::kFailed) {
      if (job.stop.load() != Status::kOk) return job.stop.load();
      std::string why = session->trouble().empty() ? "the peer ended it" : session->trouble();
      return fail_greeting(Status::kProtocolError, "no TLS with the peer: " + why +
                                                       "; check `tls`, `tls_ca` and the certificates of both sides");
    }
  }
}

Status TcpPeer::greet(Job& job, Lane& lane) {
  int socket = lane.channel->socket();
  if (!wait_for(socket, POLLOUT, job.request.deadline)) return Status::kTimedOut;
  if (int error = error_of(socket))
    return fail_greeting(Status::kPeerLost, std::string("connecting failed: ") + std::strerror(error));
  tune(socket);
  if (tls_) {
    if (Status status = encrypt(job, lane); status != Status::kOk) return status;
  }
  wire::Hello hello;
  hello.epoch = epoch_, hello.lane = lane.name;
  (void)send_whole(*lane.channel, &hello, sizeof hello);  // a peer that refuses us may be gone and have said why
  wire::Hello answer;
  Status received = receive_answer(job, lane, answer);
  if (received == Status::kTimedOut || received == Status::kProtocolError || job.stop.load() != Status::kOk)
    return received;
  if (received != Status::kOk) {
    const TlsSession* tls = lane.channel->tls();
    if (tls && !tls->trouble().empty())
      return fail_greeting(Status::kProtocolError, "the peer refused our certificate: " + tls->trouble() +
                                                       "; both sides need certificates of the same `tls_ca`");
    return fail_greeting(Status::kPeerLost, "the peer closed the connection during the greeting");
  }
  if (answer.refusal == wire::Refusal::kNone && answer.epoch == epoch_) return Status::kOk;
  bool is_restarted = answer.refusal == wire::Refusal::kOtherProcess || answer.refusal == wire::Refusal::kNone;
  answer.refusal = is_restarted ? wire::Refusal::kOtherProcess : answer.refusal;
  return fail_greeting(is_restarted ? Status::kPeerLost : Status::kProtocolError, words_of(answer));
}

// Before anything moves: what was given up earlier must not land on top of it. The lanes stay pending
// until confirmed, so jobs that come meanwhile ask too.
Status TcpPeer::fence(Job& job, const Lane& lane) {
  std::vector<uint64_t> pending = fences_->pending();
  for (size_t at = 0; at < pending.size(); at += wire::kMaxSlices) {
    std::vector<wire::WireSlice> table;
    for (size_t i = at; i < std::min<size_t>(pending.size(), at + wire::kMaxSlices); i++)
      table.push_back({pending[i], 0, 0});
    wire::Frame frame;
    frame.kind = wire::Kind::kFence, frame.num_slices = static_cast<uint32_t>(table.size());
    size_t bytes = table.size() * sizeof table[0];
    std::vector<uint8_t> message(sizeof frame + bytes);
    std::memcpy(message.data(), &frame, sizeof frame);
    std::memcpy(message.data() + sizeof frame, table.data(), bytes);
    if (!send_whole(*lane.channel, message.data(), message.size())) return Status::kPeerLost;  // 24 KiB at most
    wire::Frame reply;
    Status received = receive_exactly(*lane.channel, &reply, sizeof reply, job.request.deadline);
    if (received != Status::kOk) return received;
    if (!wire::is_reply(reply) || reply.payload_bytes != 0) return Status::kProtocolError;
  }
  if (!pending.empty()) fences_->remove(pending);
  return Status::kOk;
}

}  // namespace mooncake
