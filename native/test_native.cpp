// SPDX-License-Identifier: Apache-2.0
// Tests below Python, for the sanitizers (scripts/sanitize) and for what Python cannot reach: broken
// peers, random bytes on the wire, threads that race. Plain asserts; a fixed seed unless one is given.
//
//     test_native [seed] [rounds]

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <system_error>
#include <thread>

#include "crc32c.h"
#include "shm.h"
#include "tcp.h"
#include "testing.h"

using namespace mooncake;
using namespace mooncake::testing;
using namespace std::chrono_literals;

namespace {

int rounds = 300;

// The definition of CRC-32C, bit by bit.
uint32_t slow_crc32c(const uint8_t* data, size_t length, uint32_t seed) {
  uint32_t crc = ~seed;
  for (size_t i = 0; i < length; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

void test_checksums() {
  std::vector<uint8_t> from = noise(70'000), to(70'000);
  for (const char* name : detail::implementations()) {
    detail::choose(name);
    assert(crc32c("123456789", 9) == 0xe3069283);  // the check value of CRC-32C
    for (int i = 0; i < rounds * 2; i++) {
      size_t start = below(300), length = below(i % 8 ? 1500 : 65'000), there = below(200);
      auto seed = static_cast<uint32_t>(rng());
      uint32_t sum = slow_crc32c(&from[start], length, seed);
      assert(crc32c(&from[start], length, seed) == sum);
      std::fill(to.begin(), to.end(), 0);
      assert(copy_crc32c(&to[there], &from[start], length, seed, i % 2) == sum);
      assert(std::memcmp(&to[there], &from[start], length) == 0 && to[there + length] == 0);
      std::fill(to.begin(), to.end(), 0);
      copy(&to[there], &from[start], length, i % 2);
      assert(std::memcmp(&to[there], &from[start], length) == 0 && to[there + length] == 0);
      size_t cut = below(length + 1);
      uint32_t head = crc32c(&from[start], cut, seed), tail = crc32c(&from[start + cut], length - cut);
      assert(crc32c_combine(head, tail, length - cut) == sum);
    }
  }
  detail::choose(detail::implementations().front());
}

// The region around a range, for a moment.
RegionRef find(const RegionTable& table, uint64_t address, uint64_t length, bool needs_write = false) {
  RegionRef found = table.use(address, length, needs_write);
  if (found) found->end_use();
  return found;
}

void test_regions() {
  RegionTable table;
  std::vector<uint8_t> memory(1000);
  uint64_t base = address_of(memory.data());
  RegionRef whole = table.add(base, 1000, true), part = table.add(base + 100, 50, false);
  assert(find(table, base + 100, 50) == part && find(table, base + 100, 50, true) == whole);
  assert(find(table, base + 140, 20) == whole);  // beyond the part that starts nearer
  assert(!find(table, base + 999, 2) && !find(table, base - 1, 1) && !find(table, base, UINT64_MAX));
  assert(table.find_key(part->key) == part && !table.find_key(part->key ^ 1));
  std::atomic<bool> is_inside{false}, has_left{false};
  std::thread toucher([&] {
    std::vector<RegionRef> regions{whole, part};
    Touch touch(regions);
    assert(touch);
    is_inside = true;
    std::this_thread::sleep_for(20ms);
    has_left = true;
  });
  while (!is_inside) std::this_thread::yield();
  table.remove(whole->key);
  assert(has_left && whole->is_closed() && !whole->enter());
  toucher.join();
  assert(find(table, base + 100, 50) == part && !find(table, base + 100, 50, true) && !find(table, base, 10));
  std::string error;
  RegionRef shared = table.allocate(3 << 20, true, true, error);
  assert(shared && shared->is_shared() && table.all().size() == 2);
  reinterpret_cast<uint8_t*>(shared->address)[(3 << 20) - 1] = 1;
  assert(!table.allocate(1ull << 60, true, true, error) && !error.empty());
  table.remove_all();
  assert(table.all().empty());
}

// Brief regions of operations that use the same memory: what one removes stays open for the jobs of the others.
void test_brief_regions() {
  RegionTable table;
  std::vector<uint8_t> memory(1000);
  uint64_t base = address_of(memory.data());
  auto add = [&](uint64_t offset, uint64_t size) { return table.add(base + offset, size, true, true); };
  for (auto [offset, size] : {std::pair<uint64_t, uint64_t>{0, 1000}, {0, 500}, {100, 100}, {100, 900}}) {
    RegionRef mine = add(0, 1000), other = add(offset, size);
    RegionRef used = table.use(base + 100, 100, true);
    assert(used == other);  // although it is mine, too
    table.remove(other->key);
    assert(!other->is_closed() && find(table, base + 100, 100) == mine);
    used->end_use();
    table.remove(mine->key);
    assert(mine->is_closed() && other->is_closed() && table.all().empty());
  }
  RegionRef alone = add(0, 100), beside = add(100, 100);
  assert(table.use(base, 100, true) == alone);
  table.remove(alone->key);  // while its own operation still uses it
  assert(alone->is_closed() && !beside->is_closed());
  alone->end_use();
  RegionRef lasting = table.add(base + 100, 100, true), used = table.use(base + 100, 100, true);
  assert(used == lasting);
  table.remove(lasting->key);  // no other region is around it
  assert(lasting->is_closed());
  used->end_use();
  RegionRef first = add(500, 100), second = add(500, 100);
  assert(table.use(base + 500, 100, true) == second);
  table.remove(second->key);
  assert(!second->is_closed());
  table.remove_all();
  assert(first->is_closed() && second->is_closed() && beside->is_closed() && table.all().empty());
  second->end_use();
}

// A forked child has other files under the numbers of its parent's sockets, and moves nothing for it.
void test_forked_children() {
  auto table = std::make_shared<RegionTable>();
  std::vector<uint8_t> memory(100, 0);
  RegionRef local = table->add(address_of(memory.data()), memory.size(), true);
  auto peer = std::make_shared<TcpPeer>(table, std::vector<RemoteRegion>{{5000, 100, 3}},
                                        *TcpAddress::parse("127.0.0.1", 1), 7, 1);
  auto queue = std::make_shared<Queue>();
  int ends[2], go_on[2];
  assert(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && pipe(go_on) == 0);
  leave_to_parent(ends[0]);
  OwnProcess own;
  assert(own);
  pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    bool is_right = !own && OwnProcess() && send(ends[0], &byte, 1, MSG_NOSIGNAL) < 0 && errno == ENOTSOCK;
    close(go_on[1]);
    Completion done = peer->run(request(Op::kRead, {{local->address, 5000, 10}}));
    is_right &= done.status == Status::kCancelled && done.reason.find("forked") != std::string::npos;
    int64_t failed = -1;
    peer->submit(queue, 4, request(Op::kRead, {{local->address, 5000, 10}}), failed);
    auto drained = queue->drain(1, 0);
    is_right &= drained.size() == 1 && drained[0].status == Status::kCancelled && drained[0].token == 4;
    peer->cancel();
    is_right &= read(go_on[0], &byte, 1) == 0;  // until the parent has seen the end of its socket
    _exit(is_right ? 0 : 1);
  }
  close_own(ends[0]);
  char byte;
  assert(recv(ends[1], &byte, 1, 0) == 0);
  close(go_on[0]), close(go_on[1]), close(ends[1]);
  int status;
  assert(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  assert(own);
  pollfd entry{queue->fileno(), POLLIN, 0};  // what the child has submitted does not wake the parent
  assert(poll(&entry, 1, 0) == 0 && queue->drain(1, 0).empty());
  peer->close();
}

void test_queue() {
  Queue queue;
  auto is_readable = [&] {
    pollfd entry{queue.fileno(), POLLIN, 0};
    return poll(&entry, 1, 0) == 1;
  };
  assert(!is_readable() && queue.drain(10, 0).empty() && queue.drain(10, 0.001).empty());
  std::vector<std::thread> producers;
  for (int i = 0; i < 4; i++)
    producers.emplace_back([&] {
      for (int j = 0; j < 250; j++) queue.push({});
    });
  size_t count = 0;
  while (count < 1000) count += queue.drain(7, 5).size();
  for (auto& producer : producers) producer.join();
  assert(!is_readable());
  queue.push({});
  queue.push({});
  assert(is_readable() && queue.drain(1, 0).size() == 1 && is_readable() && queue.drain(5, 0).size() == 1 &&
         !is_readable());
}

void test_wire() {
  wire::Frame frame;
  frame.kind = wire::Kind::kWrite, frame.num_slices = 2, frame.payload_bytes = 10;
  assert(wire::is_request(frame) && !wire::is_reply(frame));
  std::vector<wire::WireSlice> slices{{100, 4, 1}, {200, 6, 1}};
  assert(wire::fits(frame, slices));
  for (auto& broken : std::vector<std::vector<wire::WireSlice>>{{{100, 4, 1}, {200, 5, 1}},
                                                                {{100, 4, 1}, {200, 7, 1}},
                                                                {{100, 10, 1}, {200, 0, 1}},
                                                                {{UINT64_MAX - 1, 4, 1}, {200, 6, 1}}})
    assert(!wire::fits(frame, broken));
  frame.num_slices = wire::kMaxSlices + 1;
  assert(!wire::is_request(frame));
}

// Two processes in one: `near` moves, `far` exposes a region with untouchable margins.
struct Pair {
  static constexpr uint64_t kSize = 300'000, kMargin = 512;
  std::shared_ptr<RegionTable> near = std::make_shared<RegionTable>(), far = std::make_shared<RegionTable>();
  std::vector<uint8_t> here = noise(kSize), plain = std::vector<uint8_t>(kSize + 2 * kMargin, 0);
  RegionRef local = near->add(address_of(here.data()), kSize, true);
  RegionRef remote;
  std::shared_ptr<Peer> peer;
  std::unique_ptr<TcpServer> server;
  std::shared_ptr<ShmTransport> near_shm, far_shm;

  explicit Pair(bool is_tcp, int num_streams = 2) {
    if (is_tcp) {
      remote = far->add(address_of(plain.data()) + kMargin, kSize, true);
      server = std::make_unique<TcpServer>(far, 7, std::vector<std::string>{"127.0.0.1"}, 0, 2);
      auto address = TcpAddress::parse("127.0.0.1", server->ports()[0]);
      peer = std::make_shared<TcpPeer>(near, published(*far), *address, 7, num_streams);
      near->listen(peer);
    } else {
      std::string error;
      remote = far->allocate(kSize, false, true, error);
      far_shm = std::make_shared<ShmTransport>(far, 7), near_shm = std::make_shared<ShmTransport>(near, 8);
      far->listen(far_shm);
      Status status;
      peer = near_shm->connect(far_shm->endpoint(), 7, published(*far), Clock::now() + 5s, status);
      assert(peer && status == Status::kOk);
      assert(!near_shm->connect(far_shm->endpoint(), 6, {}, Clock::now() + 5s, status) && status == Status::kPeerLost);
      assert(!near_shm->connect("mooncake-missing", 7, {}, Clock::now() + 5s, status) && status == Status::kPeerLost);
    }
  }
  ~Pair() {
    peer->close();
    if (server) server->close();
  }
  uint8_t* there() const { return reinterpret_cast<uint8_t*>(remote->address); }
  bool margins_are_intact() const {
    auto is_zero = [](uint8_t byte) { return byte == 0; };
    return std::all_of(plain.begin(), plain.begin() + kMargin, is_zero) &&
           std::all_of(plain.end() - kMargin, plain.end(), is_zero);
  }
};

void test_moving(bool is_tcp) {
  Pair pair(is_tcp);
  for (int i = 0; i < rounds / 10; i++) {
    std::vector<Slice> slices;
    uint64_t at = below(50);
    while (at < Pair::kSize && slices.size() < 2000) {
      uint64_t length = std::min(below(i % 3 ? 400 : 60'000), Pair::kSize - at);
      slices.push_back({pair.local->address + at, pair.remote->address + at, length});
      at += length + below(9);
    }
    bool is_submitted = i % 2;
    Completion done;
    auto move = [&](Op op) {
      if (!is_submitted) return pair.peer->run(request(op, slices, true));
      auto queue = std::make_shared<Queue>();
      int64_t failed = -1;
      assert(pair.peer->submit(queue, 9, request(op, slices, true), failed) == Status::kOk);
      auto drained = queue->drain(1, 20);
      assert(drained.size() == 1 && drained[0].token == 9);
      return drained[0];
    };
    Completion sent = move(Op::kWrite);
    assert(sent.status == Status::kOk && sent.checksums.size() == slices.size());
    std::vector<uint8_t> before = pair.here;
    for (const Slice& slice : slices) std::memset(reinterpret_cast<void*>(slice.local), 0, slice.length);
    Completion received = move(Op::kRead);
    assert(received.status == Status::kOk && received.num_bytes == sent.num_bytes &&
           received.checksums == sent.checksums);
    assert(pair.here == before && pair.margins_are_intact());
    for (size_t j = 0; j < slices.size(); j++)
      assert(sent.checksums[j] == crc32c(reinterpret_cast<void*>(slices[j].local), slices[j].length));
  }
  Slice fine{pair.local->address, pair.remote->address, 10};
  Slice outside{pair.local->address, pair.remote->address + Pair::kSize - 5, 10};
  Slice unknown{pair.local->address - 1, pair.remote->address, 10};
  Completion done = pair.peer->run(request(Op::kWrite, {fine, outside}));
  assert(done.status == Status::kAccessDenied && done.failed_slice == 1);
  done = pair.peer->run(request(Op::kRead, {fine, fine, unknown}));
  assert(done.status == Status::kUnregistered && done.failed_slice == 2);
  pair.peer->set_remote({{pair.remote->address, Pair::kSize * 2, pair.remote->key}});  // claims too much
  done = pair.peer->run(request(Op::kWrite, {fine, outside}));
  assert(done.status == Status::kAccessDenied && done.failed_slice == 1 && pair.margins_are_intact());
  assert(pair.peer->run(request(Op::kWrite, {fine})).status == Status::kOk);
  pair.peer->set_remote({{pair.remote->address, Pair::kSize, pair.remote->key ^ 1}});
  assert(pair.peer->run(request(Op::kRead, {fine})).status == Status::kAccessDenied);
}

// Memory that is registered twice, once read-only: what may be written is found on both sides.
void test_overlapping_registrations() {
  Pair pair(true);
  for (int i = 0; i < 3; i++) {
    pair.near->add(pair.local->address, Pair::kSize, false);
    pair.far->add(pair.remote->address, Pair::kSize, false);
  }
  pair.peer->set_remote(published(*pair.far));
  for (Op op : {Op::kWrite, Op::kRead}) {
    Completion done = pair.peer->run(request(op, {{pair.local->address, pair.remote->address, 1000}}));
    assert(done.status == Status::kOk && std::equal(pair.here.begin(), pair.here.begin() + 1000, pair.there()));
  }
  pair.far->remove(pair.remote->key);
  pair.peer->set_remote(published(*pair.far));
  Slice slice{pair.local->address, pair.remote->address, 1000};
  assert(pair.peer->run(request(Op::kRead, {slice})).status == Status::kOk);
  assert(pair.peer->run(request(Op::kWrite, {slice})).status == Status::kAccessDenied);
  pair.near->remove(pair.local->key);
  assert(pair.peer->run(request(Op::kRead, {slice})).status == Status::kUnregistered);
}

// Traffic from several threads while regions close, jobs are cancelled and at last the target goes.
void test_ending(bool is_tcp) {
  for (int i = 0; i < rounds / 60; i++) {
    Pair pair(is_tcp);
    std::atomic<bool> is_over{false};
    std::atomic<int> num_done{0};
    std::vector<std::thread> threads;
    auto traffic = [&](Op op, uint64_t part) {
      uint64_t size = (Pair::kSize - 1000) / 4;
      while (!is_over) {
        Slice slice{pair.local->address + part * size, pair.remote->address + part * size, size};
        Status status = pair.peer->run(request(op, {slice}, part % 2)).status;
        num_done++;
        if (status != Status::kOk && status != Status::kCancelled) return;
      }
    };
    for (uint64_t part = 0; part < 4; part++) threads.emplace_back(traffic, part < 2 ? Op::kWrite : Op::kRead, part);
    auto queue = std::make_shared<Queue>();
    int64_t failed = -1;
    // Each has its own place: they come over several connections, whose threads do not wait for each other.
    for (uint64_t token = 0; token < 20; token++) {
      uint64_t place = pair.remote->address + Pair::kSize - 1000 + token * 50;
      pair.peer->submit(queue, token, request(Op::kWrite, {{pair.local->address, place, 50}}), failed);
    }
    while (num_done < 20) std::this_thread::yield();
    pair.peer->cancel();
    size_t num_ended = 0;
    while (num_ended < 20) num_ended += queue->drain(20, 10).size();
    switch (i % 3) {
      case 0:
        pair.near->remove(pair.local->key);
        std::fill(pair.here.begin(), pair.here.end(), 5);  // a late touch would be a race
        break;
      case 1:
        pair.far->remove(pair.remote->key);
        std::memset(pair.there(), 5, Pair::kSize);
        break;
      default:
        if (pair.server) pair.server->close();
        if (pair.far_shm) pair.far_shm->close();
    }
    if (i % 3 == 0) is_over = true;
    for (auto& thread : threads) thread.join();
  }
}

// Random bytes into the server's side of a connection: frames that are nearly right and bytes that are
// not. Whatever comes, memory outside the region stays as it is and the connection ends or waits.
void test_server_robustness() {
  auto table = std::make_shared<RegionTable>();
  std::vector<uint8_t> memory(20'000, 0);
  RegionRef region = table->add(address_of(memory.data()) + 1000, 18'000, true);
  for (int i = 0; i < rounds; i++) {
    int ends[2];
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    TcpConnection connection(ends[1], table, std::make_shared<Gates>(), 7);
    std::vector<uint8_t> soup;
    auto add = [&](const void* bytes, size_t size) {
      soup.insert(soup.end(), static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + size);
    };
    wire::Hello hello;
    hello.epoch = 7, hello.lane = rng() | 1;
    add(&hello, sizeof hello);
    for (uint64_t frames = below(5) + 1; frames > 0; frames--) {
      std::vector<wire::WireSlice> slices(below(30) ? below(6) + 1 : wire::kMaxSlices);
      wire::Frame frame;
      for (auto& slice : slices) {
        slice = {region->address + below(18'500), below(300) + 1, below(8) ? region->key : rng()};
        if (below(10) == 0) slice.address -= below(3000);
        frame.payload_bytes += slice.length;
      }
      frame.kind = below(2) ? wire::Kind::kWrite : wire::Kind::kRead;
      if (below(8) == 0) {
        frame.kind = wire::Kind::kFence, frame.payload_bytes = 0;
        for (auto& slice : slices) slice = {below(2) ? hello.lane : rng(), 0, 0};
      }
      frame.num_slices = static_cast<uint32_t>(slices.size());
      frame.number = frames;
      add(&frame, sizeof frame);
      add(slices.data(), slices.size() * sizeof slices[0]);
      std::vector<uint8_t> payload(frame.kind == wire::Kind::kWrite ? frame.payload_bytes : 0, 0xee);
      add(payload.data(), payload.size());
    }
    for (uint64_t flips = below(2) * below(6); flips > 0; flips--)
      soup[below(soup.size())] ^= static_cast<uint8_t>(1u << below(8));
    if (below(4) == 0) soup.resize(below(soup.size() + 1));
    if (below(10) == 0) soup = noise(below(5000) + 1);
    auto progress = TcpConnection::Progress::kWaiting;
    std::vector<uint8_t> sink(1 << 16);
    for (size_t at = 0; at < soup.size() && progress != TcpConnection::Progress::kClosed;) {
      size_t step = std::min(soup.size() - at, below(3) ? soup.size() : below(40) + 1);
      ssize_t sent = send(ends[0], soup.data() + at, step, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) at += static_cast<size_t>(sent);
      progress = connection.advance(false);
      while (recv(ends[0], sink.data(), sink.size(), MSG_DONTWAIT) > 0) progress = connection.advance(false);
    }
    close(ends[0]);
    while (connection.advance(true) == TcpConnection::Progress::kMore) continue;
    assert(connection.advance(true) == TcpConnection::Progress::kClosed);
    for (size_t at = 0; at < 1000; at++) assert(memory[at] == 0 && memory[19'000 + at] == 0);
  }
}

// A write that its client gave up lands until a fence names its lane, and never after.
void test_fence() {
  auto table = std::make_shared<RegionTable>();
  auto gates = std::make_shared<Gates>();
  std::vector<uint8_t> memory(100, 0);
  RegionRef region = table->add(address_of(memory.data()), memory.size(), true);
  struct End {
    int ends[2];
    std::unique_ptr<TcpConnection> connection;
    void send_bytes(const void* bytes, size_t size) {
      assert(send(ends[0], bytes, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
    }
    End(std::shared_ptr<RegionTable> table, std::shared_ptr<Gates> gates, uint64_t lane) {
      assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
      connection = std::make_unique<TcpConnection>(ends[1], table, gates, 7);
      wire::Hello hello;
      hello.epoch = 7, hello.lane = lane;
      send_bytes(&hello, sizeof hello);
      assert(connection->advance(false) == TcpConnection::Progress::kWaiting);
      assert(recv(ends[0], &hello, sizeof hello, MSG_DONTWAIT) == sizeof hello &&
             hello.refusal == wire::Refusal::kNone);
    }
    ~End() { close(ends[0]); }
    void ask(wire::Kind kind, uint64_t payload, wire::WireSlice slice) {
      wire::Frame frame;
      frame.kind = kind, frame.num_slices = 1, frame.payload_bytes = payload;
      send_bytes(&frame, sizeof frame);
      send_bytes(&slice, sizeof slice);
    }
  };
  End given_up(table, gates, 11), later(table, gates, 12);
  std::vector<uint8_t> ones(100, 1);
  given_up.ask(wire::Kind::kWrite, 100, {region->address, 100, region->key});
  given_up.send_bytes(ones.data(), 40);
  assert(given_up.connection->advance(false) == TcpConnection::Progress::kWaiting);
  assert(memory[39] == 1 && memory[40] == 0);
  given_up.send_bytes(ones.data(), 60);  // on its way when the fence goes up
  later.ask(wire::Kind::kFence, 0, {11, 0, 0});
  assert(later.connection->advance(false) == TcpConnection::Progress::kWaiting);
  wire::Frame reply;
  assert(recv(later.ends[0], &reply, sizeof reply, MSG_DONTWAIT) == sizeof reply && wire::is_reply(reply));
  assert(given_up.connection->advance(false) == TcpConnection::Progress::kClosed);
  assert(memory[39] == 1 && memory[40] == 0 && memory[99] == 0);
}

// A server that answers a real client with replies that are nearly right.
void test_client_robustness() {
  auto table = std::make_shared<RegionTable>();
  std::vector<uint8_t> memory(20'000, 0);
  RegionRef region = table->add(address_of(memory.data()) + 1000, 18'000, true);
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET, name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof name;
  assert(bind(listener, reinterpret_cast<sockaddr*>(&name), length) == 0 && listen(listener, 8) == 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&name), &length);
  auto address = TcpAddress::parse("127.0.0.1", ntohs(name.sin_port));
  for (int i = 0; i < rounds / 3; i++) {
    Op op = below(2) ? Op::kRead : Op::kWrite;
    uint64_t size = below(17'000) + 1;
    wire::Hello hello;
    hello.epoch = 7;
    wire::Frame reply;
    reply.number = 1;
    reply.payload_bytes = op == Op::kRead ? size : 0;
    std::vector<uint8_t> answer(sizeof hello + sizeof reply + reply.payload_bytes + below(3) * 40, 0xee);
    std::memcpy(answer.data(), &hello, sizeof hello);
    std::memcpy(answer.data() + sizeof hello, &reply, sizeof reply);
    bool is_spoilt = below(3) > 0;
    size_t spoilt_at = below(sizeof hello + sizeof reply);
    if (is_spoilt) answer[spoilt_at] ^= static_cast<uint8_t>(1u << below(8));
    if (below(4) == 0) answer.resize(below(answer.size()));
    std::thread server([&] {
      int socket = accept(listener, nullptr, nullptr);
      (void)!send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
      shutdown(socket, SHUT_WR);
      std::vector<uint8_t> sink(1 << 16);
      while (recv(socket, sink.data(), sink.size(), 0) > 0) continue;
      close(socket);
    });
    {
      auto peer = std::make_shared<TcpPeer>(table, std::vector<RemoteRegion>{{5000, 20'000, 3}}, *address, 7, 1);
      Completion done = peer->run(request(op, {{region->address, 5000, size}}, true, 5s));
      assert(done.status != Status::kTimedOut);
      peer->close();
    }
    server.join();
    for (size_t at = 0; at < 1000; at++) assert(memory[at] == 0 && memory[19'000 + at] == 0);
  }
  close(listener);
}

// Unauthenticated clients at the shared-memory socket.
void test_shm_robustness() {
  auto table = std::make_shared<RegionTable>();
  std::string error;
  RegionRef region = table->allocate(8192, false, true, error);
  auto transport = std::make_shared<ShmTransport>(table, 7);
  table->listen(transport);
  for (int i = 0; i < rounds / 3; i++) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, transport->endpoint().data(), transport->endpoint().size());
    auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + transport->endpoint().size());
    assert(connect(fd, reinterpret_cast<sockaddr*>(&name), length) == 0);
    for (uint64_t j = below(6) + 1; j > 0; j--) {
      SharingMessage message;
      message.kind = static_cast<SharingMessage::Kind>(below(9));
      message.epoch = below(4) ? 7 : rng();
      message.key = below(2) ? region->key : rng();
      std::vector<uint8_t> bytes(sizeof message);
      std::memcpy(bytes.data(), &message, sizeof message);
      if (below(4) == 0) bytes[below(bytes.size())] ^= 1;
      if (below(6) == 0) bytes.resize(below(100));
      (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    close(fd);
  }
  table->remove(region->key);
  transport->close();
}

// An owner of shared memory that is played by hand, to one client.
struct PlayedOwner {
  PlayedOwner() {
    std::string error;
    region = table->allocate(8192, false, true, error);
    listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    name = "mooncake-test-owner-" + std::to_string(random_key());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    assert(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, 1) == 0);
  }
  ~PlayedOwner() { close(listener); }
  void welcome() {
    client = std::make_unique<SharingSocket>(accept(listener, nullptr, nullptr));
    SharingMessage hello = next();
    assert(hello.kind == SharingMessage::Kind::kHello);
    hello.kind = SharingMessage::Kind::kWelcome;
    assert(client->send(hello));
  }
  SharingMessage next() {
    SharingMessage message;
    int descriptor = -1;
    assert(wait_for(client->fd, POLLIN, Clock::now() + 20s) && client->receive(message, descriptor) == 1);
    return message;
  }
  void tell(SharingMessage::Kind kind, int descriptor = -1) {
    SharingMessage message;
    message.kind = kind, message.key = region->key, message.base = region->address, message.size = region->size;
    assert(client->send(message, descriptor));
  }
  void revoke() {
    tell(SharingMessage::Kind::kRevoke);
    assert(next().kind == SharingMessage::Kind::kRevoked);
  }
  std::shared_ptr<RegionTable> table = std::make_shared<RegionTable>();
  RegionRef region;
  int listener;
  std::string name;
  std::unique_ptr<SharingSocket> client;
};

// What a client keeps of a revoked region: nothing, unless it was asked for and not yet given.
void test_revocations() {
  PlayedOwner owner;
  auto table = std::make_shared<RegionTable>();
  std::vector<uint8_t> memory(100, 0);
  RegionRef local = table->add(address_of(memory.data()), memory.size(), true);
  auto transport = std::make_shared<ShmTransport>(table, 8);
  std::thread welcome([&] { owner.welcome(); });
  Status status;
  auto peer = transport->connect(owner.name, 7, published(*owner.table), Clock::now() + 20s, status);
  welcome.join();
  assert(peer && status == Status::kOk);
  auto queue = std::make_shared<Queue>();
  auto submit = [&] {
    int64_t failed = -1;
    assert(peer->submit(queue, 1, request(Op::kRead, {{local->address, owner.region->address, 100}}), failed) ==
           Status::kOk);
  };
  auto ended = [&] {
    auto drained = queue->drain(1, 20);
    assert(drained.size() == 1);
    return drained[0].status;
  };
  owner.revoke();                // before it was asked for
  for (int i = 0; i < 2; i++) {  // asked for anew each time: nothing was kept
    submit();
    assert(owner.next().kind == SharingMessage::Kind::kGet);
    owner.tell(SharingMessage::Kind::kGive, owner.region->fd);
    assert(ended() == Status::kOk);
    owner.revoke();
  }
  submit();
  assert(owner.next().kind == SharingMessage::Kind::kGet);
  owner.revoke();
  owner.tell(SharingMessage::Kind::kGive, owner.region->fd);  // too late for every job
  assert(ended() == Status::kAccessDenied);
  submit();
  assert(ended() == Status::kAccessDenied);
  peer->close();
  transport->close();
}

// A transport that was closed connects nowhere, also if it is closed while it connects; nor does one without a thread.
void test_closed_sharing() {
  auto table = std::make_shared<RegionTable>();
  auto far = std::make_shared<ShmTransport>(table, 7);
  auto near = std::make_shared<ShmTransport>(table, 8);
  Status status = Status::kOk;
  assert(near->connect(far->endpoint(), 7, {}, Clock::now() + 20s, status) && status == Status::kOk);
  PlayedOwner owner;
  std::shared_ptr<SharingPeer> peer;
  std::thread connecting([&] { peer = near->connect(owner.name, 7, {}, Clock::now() + 20s, status); });
  owner.client = std::make_unique<SharingSocket>(accept(owner.listener, nullptr, nullptr));
  SharingMessage hello = owner.next();
  near->close();
  hello.kind = SharingMessage::Kind::kWelcome;
  assert(owner.client->send(hello));
  connecting.join();
  assert(!peer && status == Status::kPeerLost);
  status = Status::kOk;
  assert(!near->connect(far->endpoint(), 7, {}, Clock::now() + 20s, status) && status == Status::kPeerLost);
  far->close();
  NoThreads none;
  bool has_thrown = false;
  try {
    ShmTransport other(table, 9);
  } catch (const std::system_error&) {
    has_thrown = true;
  }
  assert(has_thrown);
}

// Many short connections, in threads: connect, move, close.
void test_coming_and_going() {
  auto far = std::make_shared<RegionTable>();
  const int num_visits = rounds / 30 + 1;
  // Every visit has its own place: what a closed peer sent may still land for a moment.
  std::vector<uint8_t> memory(static_cast<size_t>(num_visits) * 4 * 20'000);
  RegionRef region = far->add(address_of(memory.data()), memory.size(), true);
  TcpServer server(far, 7, std::vector<std::string>{"127.0.0.1"}, 0, 2);
  auto address = TcpAddress::parse("127.0.0.1", server.ports()[0]);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++)
    threads.emplace_back([&, i] {
      for (int j = 0; j < num_visits; j++) {
        auto near = std::make_shared<RegionTable>();
        std::vector<uint8_t> here(20'000, 1);
        RegionRef local = near->add(address_of(here.data()), here.size(), true);
        auto peer = std::make_shared<TcpPeer>(near, published(*far), *address, 7, 3);
        near->listen(peer);
        uint64_t place = region->address + static_cast<uint64_t>(j * 4 + i) * 20'000;
        Slice slice{local->address, place, 10'000}, other{local->address, place + 10'000, 10'000};
        auto queue = std::make_shared<Queue>();
        int64_t failed = -1;
        peer->submit(queue, 1, request(Op::kWrite, {other}), failed);
        assert(peer->run(request(Op::kWrite, {slice})).status == Status::kOk);
        if (j % 2) assert(queue->drain(1, 10).size() == 1);
        peer->close();
        assert(peer->run(request(Op::kWrite, {slice})).status == Status::kCancelled);
      }
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace

// One server on two addresses, and peers that begin at an address of their own.
void test_rails() {
  auto near = std::make_shared<RegionTable>(), far = std::make_shared<RegionTable>();
  std::vector<uint8_t> here = noise(100'000), there(100'000, 0);
  RegionRef local = near->add(address_of(here.data()), here.size(), true);
  RegionRef remote = far->add(address_of(there.data()), there.size(), true);
  std::vector<std::string> hosts{"127.0.0.1", "127.0.0.2"};
  TcpServer server(far, 7, hosts, 0, 2);
  assert(server.ports().size() == 2);
  for (size_t i = 0; i < hosts.size(); i++) {
    auto address = TcpAddress::parse(hosts[i], server.ports()[i]);
    for (const char* source : {"", "127.0.0.3", "192.0.2.7"}) {
      std::fill(there.begin(), there.end(), 0);
      auto peer = std::make_shared<TcpPeer>(near, published(*far), *address, 7, 2, TcpAddress::parse(source, 0));
      near->listen(peer);
      Request request{Op::kWrite, {{local->address, remote->address, here.size()}}, false, Clock::now() + 30s};
      Completion done = peer->run(request);
      bool is_ours = std::string(source) != "192.0.2.7";  // no address of this host
      assert(done.status == (is_ours ? Status::kOk : Status::kPeerLost));
      assert((there == here) == is_ours);
      peer->close();
    }
  }
  bool refused = false;
  try {
    TcpServer(far, 7, {"127.0.0.1", "192.0.2.7"}, 0, 1);
  } catch (const std::system_error&) {
    refused = true;
  }
  assert(refused);
}

// Without all of its descriptors a server is not made, and leaves none open.
void test_servers_without_descriptors() {
  auto table = std::make_shared<RegionTable>();
  auto next = [] {
    int fd = dup(0);
    close(fd);
    return fd;
  };
  std::vector<int> filled;  // unused numbers below used ones would count as free
  int highest = 0;
  for (int fd = 0; fd < 4096; fd++)
    if (fcntl(fd, F_GETFD) >= 0) highest = fd;
  while (next() < highest) filled.push_back(dup(0));
  const int first = next();
  rlimit usual;
  assert(getrlimit(RLIMIT_NOFILE, &usual) == 0);
  bool is_made = false;
  for (int num_free = 0; !is_made; num_free++) {
    rlimit few{static_cast<rlim_t>(first + num_free), usual.rlim_max};
    assert(setrlimit(RLIMIT_NOFILE, &few) == 0);
    int error = 0;
    try {
      TcpServer server(table, 7, {"127.0.0.1"}, 0, 2);
      is_made = true;
    } catch (const std::system_error& refused) {
      assert(setrlimit(RLIMIT_NOFILE, &usual) == 0);  // a sanitizer that looks at the error needs descriptors, too
      error = refused.code().value();
    }
    assert(setrlimit(RLIMIT_NOFILE, &usual) == 0);
    assert(is_made == (num_free == 5) && error == (is_made ? 0 : EMFILE));
    assert(next() == first);
  }
  for (int fd : filled) close(fd);
}

int main(int argc, char** argv) {
  unsigned long long seed;
  if (int asked = take_arguments(argc, argv, seed)) rounds = asked;
  Tests tests = {
      {"checksums", test_checksums},
      {"regions", test_regions},
      {"brief regions", test_brief_regions},
      {"forked children", test_forked_children},
      {"queue", test_queue},
      {"wire", test_wire},
      {"moving over tcp", [] { test_moving(true); }},
      {"moving over shm", [] { test_moving(false); }},
      {"overlapping registrations", test_overlapping_registrations},
      {"ending over tcp", [] { test_ending(true); }},
      {"ending over shm", [] { test_ending(false); }},
      {"fence", test_fence},
      {"rails", test_rails},
      {"servers without descriptors", test_servers_without_descriptors},
      {"server robustness", test_server_robustness},
      {"client robustness", test_client_robustness},
      {"shm robustness", test_shm_robustness},
      {"revocations", test_revocations},
      {"closed sharing", test_closed_sharing},
      {"coming and going", test_coming_and_going},
  };
  run_all(tests, seed);
  std::printf("checksums by %s\n", crc32c_implementation());
}
