// SPDX-License-Identifier: Apache-2.0
// Unauthenticated and faulty peers, by the million: what a process reads from sockets before the peer has
// greeted, and what it reads from peers that were sound until then. Each input is a conversation that
// is nearly right, then damaged: bits flipped, numbers replaced by those at the edges, parts cut,
// repeated, moved or replaced by noise. The sanitizers say what touches what it must not; the asserts
// here, that nothing outside a region changes and every connection comes to an end.
//
//     fuzz_frames [seed] [inputs] [target]
//
// An input depends on seed, target and number only; a failure prints the three.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cassert>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "shm.h"
#include "tcp.h"

using namespace mooncake;
using namespace std::chrono_literals;

namespace {

uint64_t seed = 1;
const char* current_target = "";
uint64_t current_input = 0;
std::mt19937_64 rng;

uint64_t below(uint64_t limit) { return limit ? rng() % limit : 0; }

void say_where(int) {
  char line[200];
  int size =
      snprintf(line, sizeof line, "\nfuzz_frames: failed with seed %llu, target %s, input %llu\n",
               static_cast<unsigned long long>(seed), current_target, static_cast<unsigned long long>(current_input));
  (void)!write(2, line, static_cast<size_t>(size));
  signal(SIGABRT, SIG_DFL);
  abort();
}

using Bytes = std::vector<uint8_t>;

template <typename Value>
void add(Bytes& bytes, const Value& value) {
  auto* at = reinterpret_cast<const uint8_t*>(&value);
  bytes.insert(bytes.end(), at, at + sizeof value);
}

uint64_t edge() {
  static const uint64_t edges[] = {0,
                                   1,
                                   2,
                                   1023,
                                   1024,
                                   1025,
                                   4095,
                                   4096,
                                   65'535,
                                   65'536,
                                   1u << 20,
                                   64u << 20,
                                   (64u << 20) + 1,
                                   INT32_MAX,
                                   UINT32_MAX,
                                   INT64_MAX,
                                   1ull << 63,
                                   UINT64_MAX - 1,
                                   UINT64_MAX};
  return edges[below(std::size(edges))] + (below(4) ? 0 : below(3) - 1);
}

void damage(Bytes& bytes) {
  if (below(4) == 0) return;  // some stay whole
  for (uint64_t times = below(4) + 1; times > 0 && !bytes.empty(); times--) {
    size_t at = below(below(3) ? std::min<size_t>(bytes.size(), 100) : bytes.size());
    size_t length = std::min<size_t>(below(60) + 1, bytes.size() - at);
    switch (below(7)) {
      case 0:
      case 1:
        bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 2: {
        uint64_t value = edge();
        std::memcpy(&bytes[at], &value, std::min<size_t>(1ull << below(4), bytes.size() - at));
        break;
      }
      case 3:
        bytes.resize(at);
        break;
      case 4:
        for (size_t i = 0; i < length; i++) bytes[at + i] = static_cast<uint8_t>(rng());
        break;
      case 5: {
        Bytes copied(bytes.begin() + static_cast<long>(at), bytes.begin() + static_cast<long>(at + length));
        bytes.insert(bytes.begin() + static_cast<long>(below(bytes.size())), copied.begin(), copied.end());
        break;
      }
      default:
        bytes.erase(bytes.begin() + static_cast<long>(at), bytes.begin() + static_cast<long>(at + length));
    }
  }
}

// What the server side works on. Region memory is exactly as large as the region, so that the address
// sanitizer sees the first byte outside.
struct Exposed {
  std::shared_ptr<RegionTable> table = std::make_shared<RegionTable>();
  std::shared_ptr<Gates> gates = std::make_shared<Gates>();
  Bytes memory = Bytes(18'000, 0), fixed = Bytes(500, 7);
  RegionRef region = table->add(reinterpret_cast<uint64_t>(memory.data()), memory.size(), true);
  RegionRef read_only = table->add(reinterpret_cast<uint64_t>(fixed.data()), fixed.size(), false);
};

Bytes requests(const Exposed& exposed) {
  Bytes bytes;
  wire::Hello hello;
  hello.epoch = below(20) ? 7 : rng(), hello.lane = rng() | 1;
  if (below(20) == 0) hello.version = static_cast<uint8_t>(rng());
  add(bytes, hello);
  for (uint64_t frames = below(4) + 1; frames > 0; frames--) {
    std::vector<wire::WireSlice> slices(below(200) ? below(4) + 1 : wire::kMaxSlices - below(3));
    wire::Frame frame;
    for (auto& slice : slices) {
      const Region& region = below(6) ? *exposed.region : *exposed.read_only;
      slice = {region.address + below(region.size), below(200) + 1, below(12) ? region.key : rng()};
      if (below(25) == 0) slice.address = edge();
      if (below(50) == 0) slice.length = edge();
      frame.payload_bytes += slice.length;
    }
    frame.kind = static_cast<wire::Kind>(below(20) ? below(2) + 1 : below(6));
    if (below(8) == 0) {
      frame.kind = wire::Kind::kFence, frame.payload_bytes = 0;
      for (auto& slice : slices) slice = {below(2) ? hello.lane : rng(), 0, 0};
    }
    frame.num_slices = static_cast<uint32_t>(slices.size()), frame.number = frames;
    add(bytes, frame);
    for (const auto& slice : slices) add(bytes, slice);
    if (frame.kind == wire::Kind::kWrite) bytes.resize(bytes.size() + std::min<uint64_t>(frame.payload_bytes, 5000), 1);
  }
  damage(bytes);
  return bytes;
}

// Sends `bytes` in pieces to a connection and lets it work; the other side reads what it answers.
void converse(TcpConnection& connection, int near, const Bytes& bytes) {
  static Bytes sink(1 << 16);
  auto progress = TcpConnection::Progress::kWaiting;
  bool in_pieces = below(4) == 0;
  for (size_t at = 0; at < bytes.size() && progress != TcpConnection::Progress::kClosed;) {
    size_t step = std::min<size_t>(bytes.size() - at, in_pieces ? below(60) + 1 : bytes.size());
    ssize_t sent = send(near, bytes.data() + at, step, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) at += static_cast<size_t>(sent);
    progress = connection.advance(false);
    while (recv(near, sink.data(), sink.size(), MSG_DONTWAIT) > 0) progress = connection.advance(false);
  }
  close(near);
  int rounds = 0;
  while ((progress = connection.advance(true)) == TcpConnection::Progress::kMore) assert(++rounds < 1000);
  assert(progress == TcpConnection::Progress::kClosed);
}

void fuzz_server() {
  static Exposed exposed;
  int ends[2];
  assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  TcpConnection connection(ends[1], exposed.table, exposed.gates, 7);
  converse(connection, ends[0], requests(exposed));
  assert(exposed.fixed == Bytes(500, 7));
}

std::shared_ptr<TlsContext> tls;  // null: this machine cannot make certificates

// A first flight that is nearly right, into a server that speaks TLS; or anything else.
void fuzz_tls() {
  static Exposed exposed;
  static Bytes flight;
  int ends[2];
  if (flight.empty()) {
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    assert(tls->session(ends[0], false)->handshake() == TlsSession::Step::kWantsRead);
    flight.resize(4096);
    flight.resize(static_cast<size_t>(recv(ends[1], flight.data(), flight.size(), 0)));
    close(ends[0]), close(ends[1]);
  }
  assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  TcpConnection connection(ends[1], exposed.table, exposed.gates, 7, tls);
  Bytes bytes = below(10) ? flight : requests(exposed);
  damage(bytes);
  if (below(3) == 0) bytes.insert(bytes.end(), flight.begin(), flight.end());
  converse(connection, ends[0], bytes);
}

// The frames of fuzz_server, but inside a TLS session whose records are sound.
void fuzz_inside_tls() {
  static Exposed exposed;
  static Bytes sink(1 << 16);
  int ends[2];
  assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  TcpConnection connection(ends[1], exposed.table, exposed.gates, 7, tls);
  Channel near(ends[0], tls->session(ends[0], false));
  while (near.tls()->handshake() == TlsSession::Step::kWantsRead) connection.advance(false);
  Bytes bytes = requests(exposed);
  std::vector<iovec> parts, back{{sink.data(), sink.size()}};
  for (size_t at = 0; at < bytes.size();) {
    size_t step = std::min<size_t>(bytes.size() - at, below(2) ? bytes.size() : below(900) + 1);
    parts.push_back({bytes.data() + at, step});
    at += step;
  }
  auto progress = TcpConnection::Progress::kWaiting;
  for (int rounds = 0; !parts.empty() && rounds < 200; rounds++) {
    ssize_t sent = near.send(parts);
    for (; sent > 0 && !parts.empty();) {
      size_t step = std::min(static_cast<size_t>(sent), parts[0].iov_len);
      parts[0].iov_base = static_cast<uint8_t*>(parts[0].iov_base) + step, parts[0].iov_len -= step;
      sent -= static_cast<ssize_t>(step);
      if (parts[0].iov_len == 0) parts.erase(parts.begin());
    }
    progress = connection.advance(false);
    if (progress == TcpConnection::Progress::kClosed) break;
    bool is_drained = false;
    while (near.receive(back, sink.size(), is_drained) > 0) connection.advance(false);
  }
  shutdown(ends[0], SHUT_RDWR);
  int rounds = 0;
  while ((progress = connection.advance(true)) == TcpConnection::Progress::kMore) assert(++rounds < 1000);
  assert(progress == TcpConnection::Progress::kClosed);
}

// Answers of a server to a real client: refusals, replies and payloads that are nearly right.
struct Answers {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  std::optional<TcpAddress> address;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Bytes> next;
  std::thread thread;

  Answers() {
    sockaddr_in name{};
    name.sin_family = AF_INET, name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof name;
    assert(bind(listener, reinterpret_cast<sockaddr*>(&name), length) == 0 && listen(listener, 8) == 0);
    getsockname(listener, reinterpret_cast<sockaddr*>(&name), &length);
    address = TcpAddress::parse("127.0.0.1", ntohs(name.sin_port));
    thread = std::thread([this] { serve(); });
    thread.detach();  // the process ends with it
  }
  void serve() {
    Bytes sink(1 << 16);
    while (true) {
      int socket = accept(listener, nullptr, nullptr);
      Bytes answer;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return next.has_value(); });
        answer = std::move(*next);
        next.reset();
        changed.notify_all();
      }
      (void)!send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
      shutdown(socket, SHUT_WR);
      while (recv(socket, sink.data(), sink.size(), 0) > 0) continue;
      linger hard{1, 0};  // no port waits for two minutes after each of a million connections
      setsockopt(socket, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
      close(socket);
    }
  }
};

void fuzz_client() {
  static auto* answers = new Answers;
  static Exposed exposed;
  Op op = below(2) ? Op::kRead : Op::kWrite;
  std::vector<Slice> slices;
  uint64_t num_bytes = 0;
  for (uint64_t i = below(3) + 1; i > 0; i--) {
    uint64_t at = below(9000), length = below(3000);
    slices.push_back({exposed.region->address + at, 5000 + at, length});
    num_bytes += length;
  }
  Bytes bytes;
  wire::Hello hello;
  hello.epoch = below(20) ? 7 : rng();
  if (below(20) == 0) hello.refusal = static_cast<wire::Refusal>(below(7));
  if (below(20) == 0) hello.version = static_cast<uint8_t>(rng());
  add(bytes, hello);
  for (uint64_t replies = below(10) ? 1 : below(4); replies > 0; replies--) {
    wire::Frame reply;
    reply.number = 1, reply.status = static_cast<uint8_t>(below(8) ? 0 : below(9));
    reply.failed_slice = static_cast<uint32_t>(below(8) ? below(4) : edge());
    reply.payload_bytes = op == Op::kRead && reply.status == 0 ? num_bytes : 0;
    if (below(20) == 0) reply.payload_bytes = edge();
    add(bytes, reply);
    bytes.resize(bytes.size() + std::min<uint64_t>(reply.payload_bytes, 20'000), 0xee);
  }
  damage(bytes);
  {
    std::unique_lock lock(answers->mutex);
    answers->next = std::move(bytes);
    answers->changed.notify_all();
  }
  auto peer =
      std::make_shared<TcpPeer>(exposed.table, std::vector<RemoteRegion>{{5000, 20'000, 3}}, *answers->address, 7, 1);
  Completion done = peer->run({op, slices, below(2) == 0, Clock::now() + 20s});
  assert(done.status != Status::kTimedOut);
  peer->close();
  std::unique_lock lock(answers->mutex);  // an empty job opens no connection
  answers->changed.wait_for(lock, num_bytes ? 20s : 0s, [&] { return !answers->next.has_value(); });
  assert(!num_bytes || !answers->next.has_value());
}

int unix_socket(const std::string& name, bool listens) {
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  auto* place = reinterpret_cast<sockaddr*>(&address);
  assert(listens ? bind(fd, place, length) == 0 && listen(fd, 8) == 0 : connect(fd, place, length) == 0);
  return fd;
}

SharingMessage sharing_message(uint64_t key) {
  SharingMessage message;
  message.kind = static_cast<SharingMessage::Kind>(below(8));
  message.epoch = below(5) ? 7 : rng();
  message.key = below(3) ? key : rng();
  message.base = below(3) ? 4096 : edge(), message.size = below(3) ? 8192 : edge();
  message.status = static_cast<uint16_t>(below(3) ? 0 : rng());
  return message;
}

void send_damaged(int fd, const SharingMessage& message, int descriptor) {
  Bytes bytes;
  add(bytes, message);
  damage(bytes);
  iovec part{bytes.data(), bytes.size()};
  msghdr header{};
  header.msg_iov = &part, header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  int both[2] = {descriptor, descriptor};
  size_t size = (below(4) ? 1 : 2) * sizeof(int);
  if (descriptor >= 0) {
    header.msg_control = control, header.msg_controllen = CMSG_SPACE(size);
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET, item->cmsg_type = SCM_RIGHTS, item->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(item), both, size);
  }
  (void)!sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Memory that a peer may show, sound or not.
int shown_memory() {
  if (below(3) == 0) return -1;
  int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  assert(fd >= 0 && ftruncate(fd, below(4) ? 8192 : 4096) == 0);
  if (below(4)) fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

// Unauthenticated clients at the socket for shared memory.
void fuzz_sharing_owner() {
  static auto table = std::make_shared<RegionTable>();
  static std::string error;
  static RegionRef region = table->allocate(8192, false, true, error);
  static auto transport = std::make_shared<ShmTransport>(table, 7);
  int fd = unix_socket(transport->endpoint(), false);
  if (below(4)) {
    SharingMessage hello;
    hello.epoch = 7;
    send_damaged(fd, hello, -1);
  }
  for (uint64_t i = below(4); i > 0; i--) {
    int shown = shown_memory();
    send_damaged(fd, sharing_message(region->key), shown);
    if (shown >= 0) close(shown);
  }
  close(fd);
}

// An owner that shows the client of its memory what is no memory of its.
void fuzz_sharing_client() {
  static auto table = std::make_shared<RegionTable>();
  static Bytes memory(9000, 0);
  static RegionRef local = table->add(reinterpret_cast<uint64_t>(memory.data()), memory.size(), true);
  static auto transport = std::make_shared<ShmTransport>(table, 8);
  static const std::string name = "mooncake-fuzz-" + std::to_string(getpid());
  static int listener = unix_socket(name, true);
  uint64_t choice = rng();  // the generator is the other thread's until it ends
  std::thread owner([&] {
    int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    SharingMessage message;
    timeval patience{5, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    (void)!recv(fd, &message, sizeof message, 0);
    message = {};
    message.kind = SharingMessage::Kind::kWelcome, message.epoch = 7;
    (void)!send(fd, &message, sizeof message, MSG_NOSIGNAL);
    if (recv(fd, &message, sizeof message, 0) > 0) {
      for (uint64_t i = below(3) + 1; i > 0; i--) {
        SharingMessage answer = sharing_message(3);
        if (below(3)) answer.kind = SharingMessage::Kind::kGive;
        int shown = shown_memory();
        send_damaged(fd, answer, shown);
        if (shown >= 0) close(shown);
      }
    }
    close(fd);
  });
  Status status;
  auto peer = transport->connect(name, 7, {{4096, 8192, 3}}, Clock::now() + 5s, status);
  assert(peer && status == Status::kOk);
  peer->run(
      {choice & 1 ? Op::kRead : Op::kWrite, {{local->address, 4096, 8192}}, (choice & 2) != 0, Clock::now() + 20s});
  owner.join();
  peer->close();
}

// Frames as numbers: what passes the checks has the properties that the rest relies on.
void fuzz_wire() {
  wire::Frame frame;
  Bytes bytes;
  frame.kind = static_cast<wire::Kind>(below(6)), frame.num_slices = static_cast<uint32_t>(below(5)),
  frame.payload_bytes = below(2) ? below(5000) : edge();
  add(bytes, frame);
  damage(bytes);
  bytes.resize(sizeof frame);
  std::memcpy(&frame, bytes.data(), sizeof frame);
  assert(!(wire::is_request(frame) && wire::is_reply(frame)));
  if (!wire::is_request(frame)) return;
  assert(frame.num_slices <= wire::kMaxSlices && frame.payload_bytes <= wire::kMaxPayload);
  std::vector<wire::WireSlice> slices(frame.num_slices);
  uint64_t left = frame.payload_bytes;
  for (auto& slice : slices) {
    slice = {below(3) ? rng() : edge(), below(4) ? left / 2 + 1 : edge(), rng()};
    left -= std::min(left, slice.length);
  }
  if (!slices.empty() && below(2)) slices.back().length += left;
  if (!wire::fits(frame, slices) || frame.kind == wire::Kind::kFence) return;
  unsigned __int128 total = 0;
  for (const auto& slice : slices) {
    assert(slice.length > 0 && slice.address + slice.length >= slice.address);
    total += slice.length;
  }
  assert(total == frame.payload_bytes);
}

// An authority and a certificate for the TLS targets, by the openssl program.
bool make_certificates() {
  char folder[] = "/tmp/mooncake-fuzz-XXXXXX";
  if (!mkdtemp(folder)) return false;
  std::string at = folder;
  std::string command = "cd " + at +
                        " && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
                        "/CN=fuzz -keyout key.pem -out cert.pem >/dev/null 2>&1";
  bool is_made = std::system(command.c_str()) == 0;
  std::string field, error;
  if (is_made) tls = TlsContext::make({at + "/cert.pem", at + "/key.pem", at + "/cert.pem"}, false, field, error);
  (void)!std::system(("rm -rf " + at).c_str());
  return tls != nullptr;
}

struct Target {
  const char* name;
  void (*run)();
  double share;  // of all inputs
  bool needs_tls = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) seed = std::strtoull(argv[1], nullptr, 10);
  uint64_t num_inputs = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 200'000;
  signal(SIGABRT, say_where);
  bool has_tls = make_certificates();
  if (!has_tls) std::printf("TLS targets are SKIPPED: no openssl program or no libssl.so.3\n");
  const Target targets[] = {
      {"wire", fuzz_wire, 0.10},
      {"server", fuzz_server, 0.668},
      {"tls", fuzz_tls, 0.06, true},
      {"inside tls", fuzz_inside_tls, 0.002, true},
      {"client", fuzz_client, 0.10},
      {"sharing owner", fuzz_sharing_owner, 0.05},
      {"sharing client", fuzz_sharing_client, 0.02},
  };
  for (const Target& target : targets) {
    if (target.needs_tls && !has_tls) continue;
    if (argc > 3 && std::strcmp(argv[3], target.name) != 0) continue;
    auto count = argc > 3 ? num_inputs : static_cast<uint64_t>(static_cast<double>(num_inputs) * target.share);
    current_target = target.name;
    auto begin = Clock::now();
    for (current_input = 0; current_input < count; current_input++) {
      rng.seed(seed * 0x9e3779b97f4a7c15 + current_input * 0x2545f4914f6cdd1d + target.name[0]);
      target.run();
    }
    double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::printf("%-16s %9llu inputs %8.1f s %9.0f a second\n", target.name, static_cast<unsigned long long>(count),
                seconds, static_cast<double>(count) / seconds);
    std::fflush(stdout);
  }
  std::printf("nothing found (seed %llu)\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  _exit(0);  // the answering thread still listens
}
