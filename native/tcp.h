// SPDX-License-Identifier: Apache-2.0
// One-sided reads and writes over TCP.
//
// The caller's thread (or a worker of the peer) sends and receives on the client's side itself; the
// target's bytes are moved by a few I/O threads that never call Python. Payload goes straight between
// the socket and registered memory. A peer has a few connections ("lanes"); a job takes one or, when
// it is big, several, and leaves them clean or closed.
#pragma once

#include <netinet/in.h>
#include <sys/uio.h>

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>

#include "channel.h"
#include "frame_task.h"
#include "transport.h"
#include "wire.h"

namespace mooncake {

// How long both ends look for the next bytes before they sleep. Waking an idle core of a virtual
// machine takes about 25 us, twice per request; looking costs at most this much of a core per pause.
constexpr auto kAttentive = std::chrono::microseconds(40);

struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  static std::optional<TcpAddress> parse(const std::string& host, int port);
  std::string host() const;  // numeric
};

// Lanes to one process on which a write was given up, until that process has confirmed that they are
// cut. Shared by all ways to it: what was given up here must not land after what goes there.
class Fences {
 public:
  static std::shared_ptr<Fences> to(uint64_t epoch);
  static void release(uint64_t epoch, std::shared_ptr<Fences>& fences);  // by a user that no longer needs it
  void add(const std::vector<uint64_t>& lanes);
  std::vector<uint64_t> pending() const;
  void remove(const std::vector<uint64_t>& lanes);

 private:
  mutable std::mutex mutex_;
  std::vector<uint64_t> pending_;
};

// The limits of a server against unauthenticated and faulty peers.
struct TcpLimits {
  std::chrono::milliseconds greeting{5000};  // from accepting a connection to the end of its greeting
  std::chrono::milliseconds stall{30'000};   // for one frame and its reply, and a second more per MiB
  // Without a byte taken or sent, while it holds staging that others wait for.
  std::chrono::milliseconds hold() const { return stall / 6; }
  size_t max_connections = 4096;
};

// The server's side of one connection; knows sockets but no event loop, so tests can drive it.
class TcpConnection {
 public:
  // `notify` is called, from any thread, when advance() has something to do although the socket has not.
  TcpConnection(int socket, std::shared_ptr<RegionTable> regions, std::shared_ptr<Gates> gates, uint64_t epoch,
                std::shared_ptr<TlsContext> tls = nullptr, std::function<void()> notify = {});
  ~TcpConnection();
  TcpConnection(const TcpConnection&) = delete;
  TcpConnection& operator=(const TcpConnection&) = delete;

  enum class Progress { kWaiting, kMore, kClosed };
  // Moves until the socket would block (kWaiting), a fair share is used up (kMore) or it is over.
  Progress advance(bool ending);
  int socket() const { return channel_.socket(); }
  // Whether it has used up the time limit of what it is doing; called now and then.
  bool is_overdue(const TcpLimits& limits, Clock::time_point now);

 private:
  enum class State { kKnock, kHello, kFrame, kWrite, kDiscard, kReply, kRefused };

  size_t num_held() const;  // chunks of staging

  bool look();     // at the first byte; false: it is not there yet
  bool receive();  // false: would block or over
  bool greet();
  void refuse(wire::Refusal refusal, uint64_t epoch = 0);
  bool outwait();
  bool parse();  // false: more bytes are needed, or over
  bool rest();   // between frames
  bool resolve(std::span<const wire::WireSlice> slices);
  bool begin(std::span<const wire::WireSlice> slices);
  bool begin_task(std::span<const wire::WireSlice> slices);
  void fence(std::span<const wire::WireSlice> slices);
  void answer(std::shared_ptr<FrameTask> task);
  void defer();
  bool take_payload();
  bool refuse_payload();
  bool send_reply();
  void reply(Status status, uint32_t failed_slice, uint64_t payload_bytes, int error = 0);

  Channel channel_;
  const std::shared_ptr<RegionTable> regions_;
  const std::shared_ptr<Gates> gates_;
  const std::shared_ptr<Gates::Gate> gate_ = std::make_shared<Gates::Gate>();
  const uint64_t epoch_;
  const std::shared_ptr<TlsContext> tls_;
  const std::function<void()> notify_;
  uint64_t lane_ = 0;
  State state_ = State::kKnock;
  bool is_greeted_ = false;
  bool is_refused_ = false;
  uint64_t num_replies_ = 0;
  uint64_t replies_seen_ = 0;  // when is_overdue() looked last
  Clock::time_point busy_since_ = Clock::now();
  uint64_t num_moved_ = 0;   // bytes, both ways, before the last advance()
  uint64_t moved_seen_ = 0;  // when is_overdue() looked last
  Clock::time_point still_since_ = Clock::now();
  bool over_ = false;
  bool waits_ = false;    // the next frame is there, but it is not its turn
  bool drained_ = false;  // the last receive took all there was
  bool ending_ = false;   // the peer closed its side: read to the end
  size_t moved_ = 0;
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0, end_ = 0;
  wire::Frame frame_;
  std::vector<RegionRef> touched_;  // regions of the frame under way
  Extents payload_;
  std::deque<std::shared_ptr<FrameTask>> due_{};  // frames taken in whose answers wait for media, oldest first
  std::shared_ptr<FrameTask> task_{};             // of the frame whose payload is arriving or being sent
  std::shared_ptr<Staging::Want> want_{};         // requested staging for the next frame
  uint64_t discard_ = 0;
  Status status_ = Status::kOk;
  uint32_t failed_slice_ = 0;
  alignas(8) uint8_t head_[sizeof(wire::Frame)];
  size_t head_bytes_ = 0, head_sent_ = 0;
  std::vector<iovec> vector_;
};

class TcpServer {
 public:
  // One server on all `hosts`: what is known of lanes holds whichever address they came by.
  // Throws std::system_error when an address cannot be had.
  TcpServer(std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::vector<std::string>& hosts, int port,
            int num_threads, std::shared_ptr<TlsContext> tls = nullptr, TcpLimits limits = {});
  ~TcpServer();
  const std::vector<int>& ports() const { return ports_; }  // one per host
  void close();

 private:
  struct Loop;
  void serve(Loop& loop);
  int listen_at(const std::string& host, int port);
  bool is_listener(int socket) const;
  void accept_all(int listener);
  void adopt(Loop& loop);

  const std::shared_ptr<RegionTable> regions_;
  const std::shared_ptr<Gates> gates_ = std::make_shared<Gates>();
  const uint64_t epoch_;
  const std::shared_ptr<TlsContext> tls_;
  const TcpLimits limits_;
  std::atomic<size_t> num_connections_{0};
  std::vector<int> listeners_;
  std::vector<int> ports_;
  size_t next_loop_ = 0;
  std::atomic<bool> closing_{false};
  std::vector<std::unique_ptr<Loop>> loops_;
  OwnProcess own_process_;
};

class TcpPeer final : public Peer {
 public:
  // Connects from `source` when there is one: that is how a rail begins at its own network card.
  TcpPeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, TcpAddress address, uint64_t epoch,
          int num_streams, std::optional<TcpAddress> source = std::nullopt, std::shared_ptr<TlsContext> tls = nullptr);
  ~TcpPeer() override;

 protected:
  Completion execute(Job& job) override;
  void wake() override { freed_.notify_all(); }
  void release() override;

 private:
  struct Lane {
    std::unique_ptr<Channel> channel;
    uint64_t name;
  };
  Status take_lanes(Job& job, size_t wanted, std::vector<Lane>& lanes);
  Status fence(Job& job, const Lane& lane);
  Status connect(Job& job, Lane& lane);
  Status greet(Job& job, Lane& lane);
  Status encrypt(Job& job, Lane& lane);
  Status receive_answer(Job& job, Lane& lane, wire::Hello& answer);
  Status fail_greeting(Status status, std::string reason);

  const TcpAddress address_;
  const std::optional<TcpAddress> source_;
  const uint64_t epoch_;
  const size_t num_streams_;
  const std::shared_ptr<TlsContext> tls_;
  std::shared_ptr<Fences> fences_;
  std::string reason_;      // why the last greeting failed
  std::vector<Lane> idle_;  // connected and clean
  size_t num_lanes_ = 0;    // idle or in use
  std::condition_variable freed_;
};

// Waits for `events` on a socket until the deadline; 0 when it passed, else poll's revents.
int wait_for(int socket, short events, Clock::time_point deadline);
int milliseconds_until(Clock::time_point deadline);
void tune(int socket);  // a connected one

}  // namespace mooncake
