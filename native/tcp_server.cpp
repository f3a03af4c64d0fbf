// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "tcp.h"

// The target's side. Edge-triggered epoll with both directions registered once: a small write costs
// one wait, one receive and one send, and no epoll_ctl. Requests of a connection are served one after
// the other, so a peer that does not read its replies stops being read from.

namespace mooncake {

namespace {

constexpr size_t kBuffer = 32 << 10;    // holds the largest slice table
constexpr size_t kFairShare = 8 << 20;  // bytes moved before other connections get their turn
constexpr size_t kMaxVector = 128;
constexpr size_t kMaxAhead = 4;                            // frames of a connection whose answers wait for media
constexpr size_t kSmallBuffer = 512;                       // until the greeting is over
constexpr auto kRarely = std::chrono::milliseconds(1000);  // looks for connections that are overdue
constexpr auto kHurriedGreeting = std::chrono::milliseconds(300);  // when nearly all connections are taken
static_assert(kBuffer >= sizeof(wire::Frame) + wire::kMaxSlices * sizeof(wire::WireSlice));

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

TcpConnection::TcpConnection(int socket, std::shared_ptr<RegionTable> regions, std::shared_ptr<Gates> gates,
                             uint64_t epoch, std::shared_ptr<TlsContext> tls, std::function<void()> notify)
    : channel_(socket),
      regions_(std::move(regions)),
      gates_(std::move(gates)),
      epoch_(epoch),
      tls_(std::move(tls)),
      notify_(std::move(notify)),
      state_(tls_ ? State::kKnock : State::kHello),
      buffer_(kSmallBuffer) {}

TcpConnection::~TcpConnection() { gates_->remove(lane_, gate_); }

// A frame and its reply have a time of their own; between frames, and where it waits for staging that other
// connections hold, a connection may rest forever. Reads the clock only here, so a frame's time counts from the
// first look that finds it. A peer that takes or sends no bytes has less time while others wait for the staging that
// it holds: otherwise a few stopped readers would keep all others waiting for as long as a slow network may take.
bool TcpConnection::is_overdue(const TcpLimits& limits, Clock::time_point now) {
  if (!is_greeted_) return now - busy_since_ > limits.greeting;
  bool rests = state_ == State::kFrame && (begin_ == end_ || want_);
  if (uint64_t moved = num_moved_ + moved_; rests || moved != moved_seen_) moved_seen_ = moved, still_since_ = now;
  bool waits_for_peer = state_ != State::kFrame;  // and not for a device
  if (waits_for_peer && now - still_since_ > limits.hold() && num_held() > 0 && Staging::serving().is_wanted())
    return true;
  if (rests || num_replies_ != replies_seen_) {
    replies_seen_ = num_replies_, busy_since_ = now;
    return false;
  }
  return now - busy_since_ > limits.stall + std::chrono::seconds(frame_.payload_bytes >> 20);
}

size_t TcpConnection::num_held() const {
  size_t held = task_ ? task_->lease.size() : 0;
  for (const auto& task : due_) held += task->lease.size();
  if (want_ && Staging::serving().is_given(want_)) held += want_->count;
  return held;
}

TcpConnection::Progress TcpConnection::advance(bool ending) {
  ending_ |= ending;
  drained_ = false;
  num_moved_ += std::exchange(moved_, 0);
  while (!over_) {
    if (moved_ >= kFairShare) return Progress::kMore;
    bool goes_on = false;
    switch (state_) {
      case State::kReply:
        goes_on = send_reply();
        break;
      case State::kWrite:
      case State::kDiscard:
        goes_on = take_payload();
        break;
      case State::kKnock:
        goes_on = look();
        break;
      case State::kHello:
        goes_on = greet() || receive();
        break;
      case State::kFrame:
        goes_on = rest();
        break;
      case State::kRefused:
        goes_on = outwait();
        break;
    }
    if (!goes_on && !over_) return Progress::kWaiting;
  }
  return Progress::kClosed;
}

// A TLS client is known by its first byte. Others are answered in the plain, with the reason.
bool TcpConnection::look() {
  uint8_t first;
  ssize_t count = recv(channel_.socket(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
  if (count < 0 && would_block()) return false;
  if (count <= 0) return over_ = true, false;
  if (first == wire::kTlsRecord) channel_.encrypt(tls_->session(channel_.socket(), true));
  state_ = State::kHello;
  return true;
}

// Fills the buffer behind what is left in it.
bool TcpConnection::receive() {
  if (drained_ && !ending_) return false;
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_, begin_ = 0;
  }
  size_t room = buffer_.size() - end_;
  vector_.assign(1, {buffer_.data() + end_, room});
  ssize_t received = channel_.receive(vector_, room, drained_);
  if (received < 0 && would_block()) return false;
  if (received < 0 && channel_.tls() && !is_greeted_) {  // OpenSSL has sent the client an alert
    state_ = State::kRefused;
    shutdown(channel_.socket(), SHUT_WR);
    return true;
  }
  if (received <= 0) return over_ = true, false;
  end_ += static_cast<size_t>(received);
  return true;
}

// Waits until the refused peer closes: closing with its bytes unread would discard the refusal.
bool TcpConnection::outwait() {
  ssize_t received = recv(channel_.socket(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
  if (received < 0 && would_block()) return false;
  if (received <= 0) return over_ = true, false;
  moved_ += static_cast<size_t>(received);
  return true;
}

void TcpConnection::refuse(wire::Refusal refusal, uint64_t epoch) {
  wire::Hello answer;
  answer.refusal = refusal, answer.epoch = epoch;  // the client's own: ours is not revealed
  std::memcpy(head_, &answer, sizeof answer);
  head_bytes_ = sizeof answer, head_sent_ = 0;
  is_refused_ = true;
  state_ = State::kReply;
}

// Magic and version come first, so another version's shorter greeting is not waited for.
bool TcpConnection::greet() {
  size_t available = end_ - begin_;
  const uint8_t* at = buffer_.data() + begin_;
  wire::Hello hello;
  std::memcpy(&hello, at, std::min(available, sizeof hello));
  if (available >= 1 && *at == wire::kTlsRecord && !channel_.tls()) return refuse(wire::Refusal::kHasNoTls), true;
  if (available >= offsetof(wire::Hello, epoch) && !wire::is_hello(hello)) {
    if (wire::is_hello_of_other_version(hello)) return refuse(wire::Refusal::kOtherVersion), true;
    return over_ = true, false;
  }
  if (available < sizeof hello) return false;
  begin_ += sizeof hello;
  if (tls_ && !channel_.tls()) return refuse(wire::Refusal::kWantsTls), true;
  if (hello.epoch != epoch_) return refuse(wire::Refusal::kOtherProcess, hello.epoch), true;
  lane_ = hello.lane;
  gates_->add(lane_, gate_);
  buffer_.resize(kBuffer);
  is_greeted_ = true;
  wire::Hello answer;
  answer.epoch = hello.epoch;
  std::memcpy(head_, &answer, sizeof answer);
  head_bytes_ = sizeof answer, head_sent_ = 0;
  state_ = State::kReply;
  return true;
}

// Between frames: answers that are due go first, so that what they hold is free for others.
bool TcpConnection::rest() {
  if (!due_.empty() && due_.front()->is_done()) {
    auto task = std::move(due_.front());
    due_.pop_front();
    answer(std::move(task));
    return true;
  }
  if (due_.size() >= kMaxAhead) return false;
  waits_ = false;
  return parse() || (!waits_ && !over_ && receive());
}

bool TcpConnection::parse() {
  size_t available = end_ - begin_;
  const uint8_t* at = buffer_.data() + begin_;
  if (available < sizeof frame_) return false;
  std::memcpy(&frame_, at, sizeof frame_);
  if (!wire::is_request(frame_)) return over_ = true, false;
  size_t table_bytes = frame_.num_slices * sizeof(wire::WireSlice);
  if (available < sizeof frame_ + table_bytes) return false;
  alignas(8) wire::WireSlice few[16];
  std::vector<wire::WireSlice> many;
  wire::WireSlice* slices = few;
  if (frame_.num_slices > std::size(few)) many.resize(frame_.num_slices), slices = many.data();
  std::memcpy(slices, at + sizeof frame_, table_bytes);
  std::span<const wire::WireSlice> table(slices, frame_.num_slices);
  if (!wire::fits(frame_, table)) return over_ = true, false;
  if (!begin(table)) return waits_ = true, false;
  begin_ += sizeof frame_ + table_bytes;
  return true;
}

// A request whose table is complete: all of it is allowed, or none of it happens. False: not yet.
bool TcpConnection::begin(std::span<const wire::WireSlice> slices) {
  if (frame_.kind == wire::Kind::kFence) return fence(slices), true;
  bool has_media = resolve(slices);
  if (has_media && begin_task(slices)) return true;
  if (has_media && status_ == Status::kOk) return false;  // there is no staging for it yet
  want_.reset();
  if (!due_.empty()) return false;  // answers go in the order of the frames
  if (frame_.kind == wire::Kind::kWrite) {
    discard_ = frame_.payload_bytes;
    state_ = status_ == Status::kOk ? State::kWrite : State::kDiscard;
    return true;
  }
  if (status_ != Status::kOk) payload_.clear();
  reply(status_, failed_slice_, payload_.bytes());
  return true;
}

// Looks the regions up; true when some have a medium and all is allowed.
bool TcpConnection::resolve(std::span<const wire::WireSlice> slices) {
  touched_.clear();
  payload_.clear();
  status_ = Status::kOk, failed_slice_ = 0;
  bool has_media = false;
  for (uint32_t i = 0; i < slices.size() && status_ == Status::kOk; i++) {
    const wire::WireSlice& slice = slices[i];
    if (touched_.empty() || touched_.back()->key != slice.key) {
      auto known =
          std::find_if(touched_.begin(), touched_.end(), [&](auto& region) { return region->key == slice.key; });
      if (known != touched_.end()) {
        std::swap(*known, touched_.back());
      } else if (RegionRef region = regions_->find_key(slice.key)) {
        touched_.push_back(std::move(region));
      } else {
        status_ = Status::kAccessDenied, failed_slice_ = i;
        break;
      }
    }
    const Region& region = *touched_.back();
    bool is_allowed =
        region.contains(slice.address, slice.length) && (region.is_writable || frame_.kind == wire::Kind::kRead);
    if (!is_allowed) status_ = Status::kAccessDenied, failed_slice_ = i;
    has_media |= region.medium != nullptr;
    payload_.add(reinterpret_cast<void*>(slice.address), slice.length);
  }
  return has_media && status_ == Status::kOk;
}

// A frame with bytes in media, once there is staging for it: a read starts at once, a write when its
// bytes have come. False: it must wait, or it is too big (see the status).
bool TcpConnection::begin_task(std::span<const wire::WireSlice> slices) {
  auto task = std::make_shared<FrameTask>(frame_, notify_);
  if (!task->plan(slices, touched_, failed_slice_)) {
    status_ = Status::kAccessDenied;
    return false;
  }
  if (!want_) {
    // A connection works ahead with as much as one frame may take, and with nothing that others wait for.
    size_t held = num_held();
    if (held > 0 && (held + task->num_chunks() > FrameTask::kMaxChunks || Staging::serving().is_wanted())) return false;
    want_ = std::make_shared<Staging::Want>();
    want_->count = task->num_chunks(), want_->wake = notify_ ? notify_ : [] {};
    if (!Staging::serving().take(want_)) return false;
  } else if (!Staging::serving().is_given(want_)) {
    return false;
  }
  task->take(std::move(want_->lease), slices);
  want_.reset();
  if (frame_.kind == wire::Kind::kRead) {
    (void)task->start(UINT64_MAX, lane_, gates_, gate_);
    task->seal();
    due_.push_back(std::move(task));
    touched_.clear(), payload_.clear();
    return true;
  }
  payload_ = std::move(task->payload);
  task_ = std::move(task);
  discard_ = frame_.payload_bytes;
  state_ = State::kWrite;
  return true;
}

// Writes of these lanes that are on their way to a medium land first, and then nothing of them.
void TcpConnection::fence(std::span<const wire::WireSlice> slices) {
  auto task = std::make_shared<FrameTask>(frame_, notify_);
  for (const wire::WireSlice& slice : slices) gates_->cut(slice.address, task);
  task->seal();
  due_.push_back(std::move(task));
}

// The payload of a write into media has come; its answer waits until it has landed.
void TcpConnection::defer() {
  task_->seal();
  due_.push_back(std::move(task_));
  task_ = nullptr;
  touched_.clear(), payload_.clear();
  state_ = State::kFrame;
}

void TcpConnection::answer(std::shared_ptr<FrameTask> task) {
  const Outcome& outcome = task->outcome();
  frame_ = task->request;
  bool brings_bytes = outcome.status == Status::kOk && frame_.kind == wire::Kind::kRead;
  payload_.clear();
  if (brings_bytes) payload_ = std::move(task->payload), touched_ = task->touched;
  task_ = std::move(task);  // holds the staging until it is sent
  reply(outcome.status, static_cast<uint32_t>(task_->failed_slice()), payload_.bytes(), outcome.error);
}

// Payload of a write: what already lies in the buffer is copied, the rest is received in place, and
// the same system call takes the beginning of the next frame.
bool TcpConnection::take_payload() {
  if (state_ == State::kDiscard) {
    size_t buffered = std::min<uint64_t>(end_ - begin_, discard_);
    begin_ += buffered, discard_ -= buffered, moved_ += buffered;
    if (discard_ > 0) return receive();
    if (task_) defer();
    else reply(status_, failed_slice_, 0);
    return true;
  }
  while (begin_ < end_ && payload_.bytes() > 0) {
    payload_.fill(vector_, 1);
    size_t piece = std::min(vector_[0].iov_len, end_ - begin_);
    Touch touch(touched_);
    if (!touch) return refuse_payload();
    std::lock_guard open(gate_->mutex);
    if (gate_->is_cut) return over_ = true, false;
    std::memcpy(vector_[0].iov_base, buffer_.data() + begin_, piece);
    begin_ += piece, moved_ += piece;
    payload_.consume(piece);
  }
  // The gate is closed only for a moment, and the task looks at it itself.
  if (task_ && !task_->start(frame_.payload_bytes - payload_.bytes(), lane_, gates_, gate_)) return over_ = true, false;
  if (payload_.bytes() == 0) {
    if (task_) defer();
    else reply(Status::kOk, 0, 0);
    return true;
  }
  if (drained_ && !ending_) return false;
  begin_ = end_ = 0;
  payload_.fill(vector_, kMaxVector);
  size_t room = 0;
  for (const iovec& extent : vector_) room += extent.iov_len;
  if (room == payload_.bytes()) vector_.push_back({buffer_.data(), buffer_.size()}), room += buffer_.size();
  ssize_t received;
  {
    Touch touch(touched_);
    if (!touch) return refuse_payload();
    std::lock_guard open(gate_->mutex);
    if (gate_->is_cut) return over_ = true, false;
    received = channel_.receive(vector_, room, drained_);
  }
  if (received < 0 && would_block()) return false;
  if (received <= 0) return over_ = true, false;
  auto count = static_cast<size_t>(received);
  size_t placed = std::min(count, payload_.bytes());
  payload_.consume(placed);
  moved_ += placed;
  end_ = count - placed;
  return true;
}

// The region was closed while the payload was arriving.
bool TcpConnection::refuse_payload() {
  discard_ = payload_.bytes();
  status_ = Status::kAccessDenied, failed_slice_ = 0;
  if (task_) task_->add_step(), task_->end_step({Status::kAccessDenied}, 0);
  state_ = State::kDiscard;
  return true;
}

void TcpConnection::reply(Status status, uint32_t failed_slice, uint64_t payload_bytes, int error) {
  wire::Frame frame;
  frame.error = static_cast<uint16_t>(status == Status::kIoError ? error : 0);
  frame.status = static_cast<uint8_t>(status);
  frame.failed_slice = failed_slice;
  frame.number = frame_.number;
  frame.payload_bytes = payload_bytes;
  if (payload_bytes == 0) payload_.clear(), touched_.clear();
  std::memcpy(head_, &frame, sizeof frame);
  head_bytes_ = sizeof frame, head_sent_ = 0;
  state_ = State::kReply;
}

bool TcpConnection::send_reply() {
  payload_.fill(vector_, kMaxVector);
  if (head_sent_ < head_bytes_) vector_.insert(vector_.begin(), {head_ + head_sent_, head_bytes_ - head_sent_});
  ssize_t sent;
  {
    Touch touch(touched_);
    if (!touch) return over_ = true, false;  // half a reply cannot be taken back, only cut off
    sent = channel_.send(vector_);
  }
  if (sent < 0 && would_block()) return false;
  if (sent < 0) return over_ = true, false;
  auto count = static_cast<size_t>(sent);
  size_t of_head = std::min(count, head_bytes_ - head_sent_);
  head_sent_ += of_head;
  payload_.consume(count - of_head);
  moved_ += count;
  if (head_sent_ == head_bytes_ && payload_.bytes() == 0) {
    touched_.clear();
    task_ = nullptr;
    num_replies_++;
    state_ = is_refused_ ? State::kRefused : State::kFrame;
    if (is_refused_) shutdown(channel_.socket(), SHUT_WR);
  }
  return true;
}

namespace {

// A server without all of its descriptors would serve nothing, and look at once again for what it has to do.
int made(int fd, const char* step) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), step);
  return fd;
}

void watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN, event.data.fd = fd;
  made(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
}

}  // namespace

// How other threads notify a loop that one of its connections has something to do; outlives the loop, because a
// device may still be at work when the server is closed.
struct Bell {
  const int fd = made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  std::mutex mutex;
  std::vector<int> sockets;

  ~Bell() { ::close(fd); }
  void ring() {
    uint64_t one = 1;
    (void)!write(fd, &one, sizeof one);
  }
  void ring(int socket) {
    std::lock_guard lock(mutex);
    sockets.push_back(socket);
    if (sockets.size() == 1) ring();
  }
};

struct TcpServer::Loop {
  std::shared_ptr<Bell> bell = std::make_shared<Bell>();
  const int epoll = made(epoll_create1(EPOLL_CLOEXEC), "epoll_create");
  std::mutex mutex;
  std::vector<int> offered;  // accepted elsewhere, to be adopted here
  std::unordered_map<int, std::unique_ptr<TcpConnection>> connections;
  std::thread thread;

  void wake() { bell->ring(); }
  ~Loop() {
    for (int socket : offered) close_own(socket);
    ::close(epoll);
  }
};

int TcpServer::listen_at(const std::string& host, int port) {
  auto fail = [&](const char* step) {
    int error = errno;
    throw std::system_error(error, std::generic_category(), host + ": " + step);
  };
  std::optional<TcpAddress> address = TcpAddress::parse(host, port);
  if (!address) errno = EINVAL, fail("address");
  int listener = ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (listener < 0) fail("socket");
  listeners_.push_back(listener);
  leave_to_parent(listener);
  int one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  auto* name = reinterpret_cast<sockaddr*>(&address->storage);
  if (bind(listener, name, address->length) != 0) fail("bind");
  if (listen(listener, 512) != 0) fail("listen");
  if (getsockname(listener, name, &address->length) != 0) fail("getsockname");
  return ntohs(address->storage.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(name)->sin6_port
                                                      : reinterpret_cast<sockaddr_in*>(name)->sin_port);
}

bool TcpServer::is_listener(int socket) const {
  return std::find(listeners_.begin(), listeners_.end(), socket) != listeners_.end();
}

TcpServer::TcpServer(std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::vector<std::string>& hosts,
                     int port, int num_threads, std::shared_ptr<TlsContext> tls, TcpLimits limits)
    : regions_(std::move(regions)), epoch_(epoch), tls_(std::move(tls)), limits_(limits) {
  try {
    for (const std::string& host : hosts) ports_.push_back(listen_at(host, port));
    for (int i = 0; i < num_threads; i++) {
      loops_.push_back(std::make_unique<Loop>());
      watch(loops_.back()->epoll, loops_.back()->bell->fd);
    }
    for (int listener : listeners_) watch(loops_[0]->epoll, listener);
    for (auto& loop : loops_) loop->thread = std::thread([this, &loop = *loop] { serve(loop); });
  } catch (...) {  // the threads that were started use this object, and its destructor does not run
    close();
    throw;
  }
}

TcpServer::~TcpServer() { close(); }

void TcpServer::close() {
  if (!own_process_) {  // a forked child: the threads are not here
    for (auto& loop : loops_) (void)loop.release();
    loops_.clear();
    return;
  }
  if (closing_.exchange(true)) return;
  for (auto& loop : loops_) loop->wake();
  for (auto& loop : loops_)
    if (loop->thread.joinable()) loop->thread.join();
  for (int listener : listeners_) close_own(listener);
  loops_.clear();
}

void TcpServer::accept_all(int listener) {
  while (true) {
    int socket = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) {
      // Out of descriptors: the listener stays readable, so give those who hold some a moment.
      if (errno == EMFILE || errno == ENFILE) usleep(10'000);
      return;
    }
    if (num_connections_.load() >= limits_.max_connections) {
      ::close(socket);
      continue;
    }
    leave_to_parent(socket);
    num_connections_++;
    tune(socket);
    int one = 1;
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    Loop& loop = *loops_[next_loop_++ % loops_.size()];
    std::lock_guard lock(loop.mutex);
    loop.offered.push_back(socket);
    loop.wake();
  }
}

void TcpServer::adopt(Loop& loop) {
  uint64_t seen;
  (void)!read(loop.bell->fd, &seen, sizeof seen);
  std::vector<int> offered;
  {
    std::lock_guard lock(loop.mutex);
    offered.swap(loop.offered);
  }
  for (int socket : offered) {
    auto notify = [bell = loop.bell, socket] { bell->ring(socket); };
    loop.connections[socket] = std::make_unique<TcpConnection>(socket, regions_, gates_, epoch_, tls_, notify);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, event.data.fd = socket;
    epoll_ctl(loop.epoll, EPOLL_CTL_ADD, socket, &event);
  }
}

void TcpServer::serve(Loop& loop) {
  std::vector<epoll_event> events(64);
  std::vector<int> ready;  // had more to do when their fair share was used up
  auto advance = [&](int socket, bool ending, std::vector<int>& again) {
    auto found = loop.connections.find(socket);
    if (found == loop.connections.end()) return;
    switch (found->second->advance(ending)) {
      case TcpConnection::Progress::kClosed:
        loop.connections.erase(found);
        num_connections_--;
        break;
      case TcpConnection::Progress::kMore:
        again.push_back(socket);
        break;
      case TcpConnection::Progress::kWaiting:
        break;
    }
  };
  auto last_look = Clock::now();
  const auto look = std::clamp(std::min(limits_.greeting, limits_.stall) / 4, kRarely / 50, kRarely);
  auto attentive_until = last_look;
  while (!closing_) {
    // A client that sent a request a moment ago often sends another, sooner than a sleeping core wakes up.
    bool is_attentive = !ready.empty() || Clock::now() < attentive_until;
    int count = epoll_wait(loop.epoll, events.data(), static_cast<int>(events.size()),
                           is_attentive ? 0 : static_cast<int>(look.count()));
    if (count > 0) attentive_until = Clock::now() + kAttentive;
    else if (is_attentive && ready.empty()) sched_yield();
    std::vector<int> again;
    for (int i = 0; i < count; i++) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.fd == loop.bell->fd) {
        adopt(loop);
        std::vector<int> rung;
        {
          std::lock_guard lock(loop.bell->mutex);
          rung.swap(loop.bell->sockets);
        }
        for (int socket : rung) advance(socket, false, again);
      } else if (is_listener(event.data.fd)) accept_all(event.data.fd);
      else advance(event.data.fd, event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR), again);
    }
    for (int socket : ready)
      if (std::find(again.begin(), again.end(), socket) == again.end()) advance(socket, false, again);
    ready.swap(again);
    bool is_crowded = num_connections_ > limits_.max_connections / 4 * 3;
    if (auto now = Clock::now(); now - last_look > (is_crowded ? look / 10 : look)) {
      last_look = now;
      TcpLimits limits = limits_;
      if (is_crowded) limits.greeting = std::min(limits.greeting, kHurriedGreeting);
      num_connections_ -=
          std::erase_if(loop.connections, [&](auto& entry) { return entry.second->is_overdue(limits, now); });
    }
  }
  loop.connections.clear();
}

}  // namespace mooncake
