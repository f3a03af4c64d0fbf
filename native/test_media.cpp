// SPDX-License-Identifier: Apache-2.0
// Tests of media below Python, for the sanitizers: staging, layouts, and transfers whose local or remote
// bytes lie in a medium. A fixed seed unless one is given.
//
//     test_media [seed] [rounds]

#include <sys/socket.h>
#include <unistd.h>

#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <system_error>
#include <thread>

#include "crc32c.h"
#include "shared_file.h"
#include "tcp.h"
#include "testing.h"

using namespace mooncake;
using namespace mooncake::testing;
using namespace std::chrono_literals;

namespace {

int rounds = 60;

// Bytes in a vector that cannot be reached by the region's addresses; fails or stalls on request.
class Drawer final : public Medium {
 public:
  Drawer(size_t size, uint64_t alignment) : bytes(size), alignment_(alignment) {}
  Outcome read(uint64_t offset, void* into, uint64_t length) override {
    wait();
    if (fails) return {Status::kIoError, EIO};
    assert(offset + length <= bytes.size());
    std::memcpy(into, &bytes[offset], length);
    return {};
  }
  Outcome write(uint64_t offset, const void* from, uint64_t length) override {
    wait();
    if (fails) return {Status::kIoError, ENOSPC};
    assert(offset + length <= bytes.size());
    std::memcpy(&bytes[offset], from, length);
    return {};
  }
  uint64_t alignment() const override { return alignment_; }
  std::vector<uint8_t> bytes;
  std::atomic<bool> fails{false}, stalls{false};

 private:
  void wait() const {
    while (stalls) std::this_thread::sleep_for(1ms);
  }
  const uint64_t alignment_;
};

struct TemporaryFile {
  TemporaryFile() {
    char name[] = "/tmp/mooncake-file-XXXXXX";
    int fd = mkstemp(name);
    assert(fd >= 0);
    close(fd);
    path = name;
  }
  ~TemporaryFile() { unlink(path.c_str()); }
  std::vector<uint8_t> bytes(size_t size) const {
    std::vector<uint8_t> found(size);
    FILE* file = std::fopen(path.c_str(), "rb");
    assert(file && std::fread(found.data(), 1, size, file) == size);
    std::fclose(file);
    return found;
  }
  std::string path;
};

constexpr uint64_t kNowhere = 0x7000'0000'0000;  // where no memory is

void test_staging() {
  Staging staging;
  auto first = std::make_shared<Staging::Want>(), second = std::make_shared<Staging::Want>(),
       third = std::make_shared<Staging::Want>();
  int num_woken = 0;
  auto wake = [&] { num_woken++; };
  first->count = 200, second->count = 100, third->count = 10;
  second->wake = third->wake = wake;
  assert(staging.take(first) && first->lease.size() == 200);
  assert(!staging.take(second) && !staging.take(third));  // enough for the third, but it is not its turn
  std::atomic<Status> stop{Status::kOk};
  Staging::Lease lease;
  assert(!staging.take(1, Clock::now() + 5ms, stop, lease));
  stop = Status::kCancelled;
  assert(!staging.take(1, Clock::now() + 20s, stop, lease));
  first.reset();
  assert(num_woken == 2 && staging.is_given(second) && staging.is_given(third));
  second.reset(), third.reset();
  stop = Status::kOk;
  assert(staging.take(Staging::kNumChunks, Clock::now() + 20s, stop, lease));
  std::atomic<int> num_done{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++)
    threads.emplace_back([&, i] {
      for (int j = 0; j < rounds; j++) {
        Staging::Lease mine;
        assert(staging.take(static_cast<size_t>(1 + i * 60), Clock::now() + 60s, stop, mine));
        std::memset(mine.chunk(0), i, 100);
        num_done++;
      }
    });
  lease = {};
  for (auto& thread : threads) thread.join();
  assert(num_done == 4 * rounds);
}

void test_layouts() {
  for (int i = 0; i < rounds; i++) {
    uint64_t alignment = 1ull << below(13);
    auto medium = std::make_shared<Drawer>(1, alignment);
    auto region = std::make_shared<Region>(kNowhere, 1ull << 40, 1, true, "drawer", medium);
    Layout layout;
    uint64_t offset = below(10'000), wanted = 0, placed = 0;
    size_t max_chunks = below(20) + 1;
    for (size_t slice = 0; slice < 300; slice++) {
      if (below(3)) offset += below(9000);
      uint64_t length = below(4) ? below(3000) : below(600'000);
      uint64_t found = layout.add(region, offset, length, slice, 7, max_chunks);
      assert(found <= length);
      wanted += length, placed += found, offset += length;
      if (found < length) break;
    }
    uint64_t in_pieces = 0, in_moves = 0;
    for (auto& piece : layout.pieces) {
      assert(piece.chunk < layout.num_chunks() && piece.at + piece.length <= Staging::kChunk && piece.length);
      in_pieces += piece.length;
    }
    for (auto& move : layout.moves) {
      assert(move.chunk < layout.num_chunks() && move.at + move.length <= Staging::kChunk);
      assert(move.at % alignment == move.offset % alignment);
      in_moves += move.length;
    }
    assert(in_pieces == placed && in_moves == placed && layout.num_chunks() <= max_chunks);
    assert(placed == wanted || layout.num_chunks() == max_chunks);
  }
}

// Local bytes in a drawer, remote ones in memory.
void test_local_media() {
  constexpr uint64_t kSize = 9'000'000;
  auto near = std::make_shared<RegionTable>(), far = std::make_shared<RegionTable>();
  // Remote memory anew for each round: what the server's thread has read from the one before is not
  // ordered before a write of ours, as the thread sanitizer sees it.
  std::deque<std::vector<uint8_t>> theres(1, std::vector<uint8_t>(kSize));
  std::vector<uint8_t> beside = noise(50'000);
  RegionRef remote = far->add(address_of(theres.back().data()), kSize, true);
  TcpServer server(far, 7, {"127.0.0.1"}, 0, 1);
  auto peer =
      std::make_shared<TcpPeer>(near, published(*far), *TcpAddress::parse("127.0.0.1", server.ports()[0]), 7, 2);
  near->listen(peer);
  auto drawer = std::make_shared<Drawer>(kSize, 512);
  drawer->bytes = noise(kSize);
  RegionRef local = near->add_medium(kNowhere, kSize, true, "drawer", drawer);
  RegionRef memory = near->add(address_of(beside.data()), beside.size(), true);
  for (int i = 0; i < rounds / 6 + 1; i++) {
    std::vector<Slice> slices;
    std::vector<uint8_t> expected(kSize);
    std::vector<uint32_t> sums;
    uint64_t at = below(50), limit = i % 3 ? 300'000 : kSize;
    while (at < limit && slices.size() < 2000) {
      bool is_beside = below(5) == 0;
      uint64_t length = std::min(below(i % 3 ? 4000 : 3'000'000), (is_beside ? beside.size() : kSize - at));
      length = std::min(length, kSize - at);
      const uint8_t* from = is_beside ? beside.data() : &drawer->bytes[at];
      slices.push_back({is_beside ? memory->address : local->address + at, remote->address + at, length});
      std::memcpy(&expected[at], from, length);
      sums.push_back(crc32c(from, length));
      at += length + below(9);
    }
    std::vector<uint8_t>& there = theres.emplace_back(kSize);
    RegionRef other = far->add(address_of(there.data()), kSize, true);
    for (Slice& slice : slices) slice.remote += other->address - remote->address;
    remote = other;
    peer->set_remote(published(*far));
    Completion sent = peer->run(request(Op::kWrite, slices, true));
    assert(sent.status == Status::kOk && sent.checksums == sums && there == expected);
    std::vector<uint8_t> kept = drawer->bytes;
    std::erase_if(slices, [&](const Slice& slice) { return slice.local == memory->address; });
    for (const Slice& slice : slices) std::memset(&drawer->bytes[slice.local - local->address], 0, slice.length);
    Completion received = peer->run(request(Op::kRead, slices, true));
    assert(received.status == Status::kOk && drawer->bytes == kept);
  }
  std::vector<Slice> all{{local->address, remote->address, kSize}};
  drawer->fails = true;
  for (Op op : {Op::kWrite, Op::kRead}) {
    Completion done = peer->run(request(op, all));
    assert(done.status == Status::kIoError && done.failed_slice == 0);
    assert(done.error == (op == Op::kWrite ? EIO : ENOSPC));
  }
  drawer->fails = false;
  assert(peer->run(request(Op::kWrite, all)).status == Status::kOk);
  auto queue = std::make_shared<Queue>();
  int64_t failed = -1;
  drawer->stalls = true;  // closing the region waits for the device, and then the job is cancelled
  assert(peer->submit(queue, 1, request(Op::kWrite, all), failed) == Status::kOk);
  std::thread closer([&] { near->remove(local->key); });
  std::this_thread::sleep_for(20ms);
  drawer->stalls = false;
  closer.join();
  auto ended = queue->drain(1, 20);
  assert(ended.size() == 1);
  assert(ended[0].status == Status::kCancelled || ended[0].status == Status::kOk);
  peer->close();
  server.close();
}

// Remote bytes in drawers, served by one loop.
struct Served {
  static constexpr uint64_t kSize = 5'000'000;
  std::shared_ptr<RegionTable> near = std::make_shared<RegionTable>(), far = std::make_shared<RegionTable>();
  std::shared_ptr<Drawer> drawer;
  std::vector<uint8_t> here = noise(kSize), plain = std::vector<uint8_t>(10'000);
  RegionRef local = near->add(address_of(here.data()), kSize, true);
  RegionRef remote, memory = far->add(address_of(plain.data()), plain.size(), true);
  std::unique_ptr<TcpServer> server;
  std::shared_ptr<TcpPeer> peer, other;

  explicit Served(uint64_t alignment) : drawer(std::make_shared<Drawer>(kSize, alignment)) {
    remote = far->add_medium(kNowhere, kSize, true, "drawer", drawer);
    server = std::make_unique<TcpServer>(far, 7, std::vector<std::string>{"127.0.0.1"}, 0, 1);
    peer = connect(), other = connect();
  }
  ~Served() {
    drawer->stalls = false;
    peer->close(), other->close(), server->close();
  }
  std::shared_ptr<TcpPeer> connect() {
    auto made =
        std::make_shared<TcpPeer>(near, published(*far), *TcpAddress::parse("127.0.0.1", server->ports()[0]), 7, 2);
    near->listen(made);
    return made;
  }
  Completion move(Op op, uint64_t at, uint64_t length, Clock::duration patience = 20s) {
    return peer->run(request(op, {{local->address + at, remote->address + at, length}}, true, patience));
  }
};

void test_remote_media() {
  for (uint64_t alignment : {1, 512, 4096}) {
    Served served(alignment);
    for (int i = 0; i < rounds / 8 + 1; i++) {
      std::vector<Slice> slices;
      std::vector<uint8_t> expected = served.drawer->bytes, before = served.here;
      uint64_t at = below(50), limit = i % 3 ? 300'000 : Served::kSize;
      while (at < limit && slices.size() < 3000) {
        bool is_memory = below(6) == 0;  // frames that write to both
        uint64_t length = std::min(below(i % 3 ? 1500 : 900'000), limit - at);
        if (is_memory) length = std::min<uint64_t>(length, 2000);
        slices.push_back({served.local->address + at,
                          is_memory ? served.memory->address + below(8000) : served.remote->address + at, length});
        if (!is_memory) std::memcpy(&expected[at], &served.here[at], length);
        at += length + (below(3) ? 0 : below(600));
      }
      Completion sent = served.peer->run(request(Op::kWrite, slices, true));
      assert(sent.status == Status::kOk && served.drawer->bytes == expected);
      std::erase_if(slices, [&](const Slice& slice) {
        return slice.remote < served.remote->address || slice.remote >= served.remote->address + Served::kSize;
      });
      for (const Slice& slice : slices) std::memset(reinterpret_cast<void*>(slice.local), 0, slice.length);
      Completion received = served.peer->run(request(Op::kRead, slices, true));
      assert(received.status == Status::kOk && served.here == before);
    }
  }
}

// A device that hangs costs those who wait for it, and a write that was given up lands before what follows.
void test_slow_media() {
  Served served(512);
  served.drawer->fails = true;
  for (Op op : {Op::kWrite, Op::kRead}) {
    Completion done = served.move(op, 0, 2'000'000);
    assert(done.status == Status::kIoError && done.error == (op == Op::kWrite ? ENOSPC : EIO) &&
           done.failed_slice == 0);
    assert(!done.reason.empty());
  }
  served.drawer->fails = false;
  assert(served.move(Op::kWrite, 0, 2'000'000).status == Status::kOk);
  served.drawer->stalls = true;
  assert(served.move(Op::kRead, 3'000'000, 2'000'000, 50ms).status == Status::kTimedOut);
  Slice beside{served.local->address, served.memory->address, 10'000};
  for (int i = 0; i < 20; i++) assert(served.other->run(request(Op::kWrite, {beside})).status == Status::kOk);
  // The write that is given up is in the device's hands: what comes after it waits until it has landed.
  assert(served.move(Op::kWrite, 0, 2'000'000, 50ms).status == Status::kTimedOut);
  std::vector<uint8_t> later = noise(2'000'000);
  RegionRef local = served.near->add(address_of(later.data()), later.size(), true);
  Slice again{local->address, served.remote->address, later.size()};
  assert(served.peer->run(request(Op::kWrite, {again}, false, 50ms)).status == Status::kTimedOut);
  served.drawer->stalls = false;
  assert(served.peer->run(request(Op::kWrite, {again})).status == Status::kOk);
  assert(std::equal(later.begin(), later.end(), served.drawer->bytes.begin()));
}

// Where the system gives no thread, media refuse, and the server's loop goes on.
void test_media_without_threads() {
  TemporaryFile file;
  for (bool ring : {true, false}) {
    auto medium = std::make_shared<FileMedium>(file.path, 10'000, FileMedium::Options{true, false, ring, 4});
    std::vector<uint8_t> memory(10'000);
    Outcome outcome;
    {
      NoThreads none;
      medium->start(Op::kRead, 0, memory.data(), memory.size(), [&](Outcome found) { outcome = found; });
      assert(outcome.status == Status::kIoError && outcome.error == EAGAIN);
    }
    std::atomic<int> error{-1};
    medium->start(Op::kRead, 0, memory.data(), memory.size(), [&](Outcome found) {
      error = found.error;
      error.notify_one();
    });
    error.wait(-1);
    assert(error == 0);
  }
  // A job that a ring does not carry ends, too: it does not try again without end.
  auto table = std::make_shared<RegionTable>();
  auto medium = std::make_shared<FileMedium>(file.path, 10'000, FileMedium::Options{true, true, false, 4});
  std::vector<uint8_t> memory(10'000);
  RegionRef local = table->add(address_of(memory.data()), memory.size(), true);
  RegionRef remote = table->add_medium(medium->address(), medium->size(), true, "file", medium);
  auto peer = std::make_shared<FilePeer>(table, table, published(*table), 1);
  for (Op op : {Op::kRead, Op::kWrite}) {
    NoThreads none;
    Completion done = peer->run(request(op, {{local->address, remote->address, 10'000}}));
    assert(done.status == Status::kIoError && done.error == EAGAIN && done.failed_slice == 0 && !done.reason.empty());
  }
  assert(peer->run(request(Op::kRead, {{local->address, remote->address, 10'000}})).status == Status::kOk);
  peer->close();
  Served served(512);
  {
    NoThreads none;
    for (Op op : {Op::kRead, Op::kWrite}) {
      Completion done = served.move(op, 0, 100'000);
      assert(done.status == Status::kIoError && done.error == EAGAIN && !done.reason.empty());
    }
    bool has_thrown = false;
    try {
      TcpServer other(served.far, 7, {"127.0.0.1"}, 0, 1);
    } catch (const std::system_error&) {
      has_thrown = true;
    }
    assert(has_thrown);
  }
  assert(served.move(Op::kRead, 0, 100'000).status == Status::kOk);
}

// The reason of a failed transfer does not depend on where the local bytes are.
void test_reasons_of_staged_transfers() {
  auto table = std::make_shared<RegionTable>();
  RegionRef local = table->add_medium(kNowhere, 10'000, true, "drawer", std::make_shared<Drawer>(10'000, 1));
  std::vector<RemoteRegion> remote{{kNowhere, 10'000, 3}};
  // Nothing listens at port 1.
  auto peer = std::make_shared<TcpPeer>(table, remote, *TcpAddress::parse("127.0.0.1", 1), 7, 1);
  for (Op op : {Op::kRead, Op::kWrite}) {
    Completion done = peer->run(request(op, {{local->address, kNowhere, 100}}));
    assert(done.status == Status::kPeerLost && done.reason.find("connecting failed") == 0);
  }
  peer->close();
}

// The server's side of one connection to a drawer, driven by hand; its socket's buffers are small.
struct Driven {
  static constexpr uint64_t kFrame = 1 << 20;
  explicit Driven(const std::shared_ptr<RegionTable>& table) {
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    connection = std::make_unique<TcpConnection>(ends[1], table, std::make_shared<Gates>(), 7);
    wire::Hello hello;
    hello.epoch = 7, hello.lane = 1;
    assert(send(ends[0], &hello, sizeof hello, 0) == sizeof hello);
    advance();
    assert(recv(ends[0], &hello, sizeof hello, MSG_DONTWAIT) == sizeof hello);
  }
  ~Driven() { close(ends[0]); }
  void advance() {
    while (connection->advance(false) == TcpConnection::Progress::kMore) continue;
  }
  void read(const Region& region, uint64_t length = kFrame) {
    wire::Frame frame;
    frame.kind = wire::Kind::kRead, frame.num_slices = 1, frame.payload_bytes = length;
    wire::WireSlice slice{region.address, length, region.key};
    assert(send(ends[0], &frame, sizeof frame, 0) == sizeof frame);
    assert(send(ends[0], &slice, sizeof slice, 0) == sizeof slice);
    advance();
  }
  // Until the first bytes of an answer have come.
  void wait_for_answer() {
    char byte;
    while (recv(ends[0], &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 1) {
      std::this_thread::yield();
      advance();
    }
  }
  int ends[2];
  std::unique_ptr<TcpConnection> connection;
};

// Staging that peers hold without reading: those who wait for it are not disconnected, and those who hold it have
// less time while others wait.
void test_staging_of_stopped_readers() {
  auto table = std::make_shared<RegionTable>();
  auto drawer = std::make_shared<Drawer>(20 << 20, 1);
  RegionRef region = table->add_medium(kNowhere, 20 << 20, true, "drawer", drawer);
  TcpLimits limits;
  std::atomic<Status> stop{Status::kOk};
  Staging::Lease all;
  assert(Staging::serving().take(Staging::kNumChunks, Clock::now() + 20s, stop, all));
  Driven waiting(table);
  waiting.read(*region, 1000);
  for (auto now : {Clock::now(), Clock::now() + 10 * limits.stall})
    assert(!waiting.connection->is_overdue(limits, now));
  all = {};
  waiting.wait_for_answer();

  Driven stopped(table), slow_device(table);
  stopped.read(*region);
  stopped.wait_for_answer();
  drawer->stalls = true;
  for (int i = 0; i < 5; i++) slow_device.read(*region, 1000);
  auto now = Clock::now(), soon = now + limits.hold() + 1s;
  for (auto* one : {&stopped, &slow_device}) {
    assert(!one->connection->is_overdue(limits, now));  // has seen what was sent
    assert(!one->connection->is_overdue(limits, soon));
  }
  auto want = std::make_shared<Staging::Want>();
  want->count = Staging::kNumChunks, want->wake = [] {};
  assert(!Staging::serving().take(want));
  assert(stopped.connection->is_overdue(limits, soon));
  assert(!slow_device.connection->is_overdue(limits, soon));
  std::vector<uint8_t> sink(1 << 16);
  while (recv(stopped.ends[0], sink.data(), sink.size(), MSG_DONTWAIT) > 0) stopped.advance();
  assert(!stopped.connection->is_overdue(limits, soon));  // it goes on
  drawer->stalls = false;
}

// One connection works ahead with no more staging than one frame may take, and not while others wait.
void test_staging_ahead_is_bounded() {
  auto table = std::make_shared<RegionTable>();
  auto drawer = std::make_shared<Drawer>(20 << 20, 1);
  RegionRef region = table->add_medium(kNowhere, 20 << 20, true, "drawer", drawer);
  std::atomic<Status> stop{Status::kOk};
  auto num_free = [&] {
    for (size_t count = Staging::kNumChunks; count > 0; count--) {
      auto want = std::make_shared<Staging::Want>();
      want->count = count, want->wake = [] {};
      if (Staging::serving().take(want)) return count;
    }
    return size_t{0};
  };
  drawer->stalls = true;
  {
    Driven greedy(table);
    for (int i = 0; i < 4; i++) greedy.read(*region, 15 << 20);
    assert(num_free() == Staging::kNumChunks - 60);
    Driven modest(table);
    for (int i = 0; i < 4; i++) modest.read(*region);
    assert(num_free() == Staging::kNumChunks - 60 - 16);
    Driven late(table);
    late.read(*region);
    auto want = std::make_shared<Staging::Want>();
    want->count = Staging::kNumChunks, want->wake = [] {};
    assert(!Staging::serving().take(want));
    for (int i = 0; i < 3; i++) late.read(*region);
    want.reset();
    assert(num_free() == Staging::kNumChunks - 60 - 16 - 4);
    drawer->stalls = false;
  }
  Staging::Lease all;  // when the device is done
  assert(Staging::serving().take(Staging::kNumChunks, Clock::now() + 20s, stop, all));
}

// Regions close, jobs are cancelled, peers and at last the server go, with moves under way.
void test_ending_media() {
  for (int i = 0; i < rounds / 10 + 1; i++) {
    Served served(512);
    std::atomic<int> num_done{0}, num_summed{0};
    std::vector<std::thread> threads;
    for (uint64_t part = 0; part < 3; part++)
      threads.emplace_back([&, part] {
        Status status = Status::kOk;
        while (status == Status::kOk || (status == Status::kCancelled && i % 3 == 2)) {
          if (num_done > 2000) return;
          Slice slice{served.local->address + part * 1'000'000, served.remote->address + part * 1'000'000, 1'000'000};
          status = served.peer->run(request(part == 2 ? Op::kRead : Op::kWrite, {slice})).status;
          num_done++;
        }
      });
    while (num_done < 5) std::this_thread::yield();
    served.drawer->stalls = i % 2;
    switch (i % 3) {
      case 0: {
        std::thread remover([&] { served.far->remove(served.remote->key); });
        std::this_thread::sleep_for(5ms);
        served.drawer->stalls = false;
        remover.join();
        std::fill(served.drawer->bytes.begin(), served.drawer->bytes.end(), 5);  // a late touch would be a race
        break;
      }
      case 1:
        served.server->close();
        served.drawer->stalls = false;
        break;
      default:
        served.peer->cancel();
        served.drawer->stalls = false;
        num_done = 3000;
    }
    for (auto& thread : threads) thread.join();
  }
}

// Ranges of every alignment by the calls that block and by those that don't, several at once.
void test_files() {
  constexpr uint64_t kSize = 2'000'123;
  for (bool ring : {true, false})
    for (bool direct : {true, false}) {
      TemporaryFile file;
      auto medium = std::make_shared<FileMedium>(file.path, kSize, FileMedium::Options{true, direct, ring, 4});
      auto region = std::make_shared<Region>(medium->address(), kSize, 1, true, "file", medium);
      std::vector<uint8_t> model(kSize), memory(kSize + 64);
      for (int i = 0; i < rounds / 10 + 1; i++) {
        uint64_t skew = below(2) ? 0 : below(64), at = below(5000);
        std::vector<uint8_t> from = noise(kSize + 64);
        std::atomic<int> num_left{0};
        while (at < kSize) {
          uint64_t length = std::min(below(4) ? below(9000) : below(600'000), kSize - at);
          if (length == 0) break;
          std::memcpy(&model[at], &from[at + skew], length);
          if (below(2)) {
            assert(medium->write(at, &from[at + skew], length).status == Status::kOk);
          } else {
            num_left++;
            medium->start(Op::kWrite, at, &from[at + skew], length, [&num_left](Outcome outcome) {
              assert(outcome.status == Status::kOk);
              num_left--;
              num_left.notify_one();
            });
          }
          at += length + below(5000);
        }
        for (int seen = num_left; seen > 0; seen = num_left) num_left.wait(seen);
        assert(file.bytes(kSize) == model);
        uint64_t start = below(kSize), length = below(kSize - start);
        assert(medium->read(start, memory.data() + skew, length).status == Status::kOk);
        assert(std::memcmp(memory.data() + skew, &model[start], length) == 0);
      }
      assert(medium->flush().status == Status::kOk);
      assert(truncate(file.path.c_str(), 5000) == 0);
      Outcome outcome = medium->read(0, memory.data(), 100'000);
      assert(outcome.status == Status::kIoError && outcome.error == ENODATA);
      std::atomic<int> error{-1};
      medium->start(Op::kRead, 4096, memory.data(), 100'000, [&](Outcome outcome) {
        error = outcome.error;
        error.notify_one();
      });
      error.wait(-1);
      assert(error == ENODATA);
    }
}

// What the kernel says of a part decides whether its rest is tried. A read through the page cache that stops early may
// have met a place that the disk does not read: the next answer says whether that is so, or it is the end of the file.
void test_rests_of_parts() {
  std::vector<uint8_t> memory(8192);
  auto after = [&](bool is_direct, std::initializer_list<int> results) {
    FileIo io{Op::kRead, -1, memory.data(), memory.size(), 100, is_direct};
    Outcome outcome;
    bool goes_on = true;
    for (int result : results) {
      assert(goes_on);
      goes_on = FileMedium::goes_on(io, result, outcome);
    }
    assert(!goes_on);
    return outcome.status == Status::kOk ? 0 : outcome.error;
  };
  assert(after(false, {3996, -EIO}) == EIO && after(false, {3996, 0}) == ENODATA);
  assert(after(false, {3996, -EAGAIN, -EINTR, 4196}) == 0);
  assert(after(true, {3996}) == ENODATA && after(true, {4096, -EIO}) == EIO && after(true, {4096, 4096}) == 0);
}

// The path `file` from several threads, until the file, the memory or the owner goes: within a process, and
// as another process would, by the descriptor.
void test_file_peers() {
  constexpr uint64_t kSize = 4 << 20;
  for (int i = 0; i < 2 * (rounds / 12 + 1); i++) {
    TemporaryFile file;
    bool is_shared = i % 2;
    auto table = std::make_shared<RegionTable>(), far = is_shared ? std::make_shared<RegionTable>() : table;
    std::vector<uint8_t> memory = noise(kSize);
    RegionRef local = table->add(address_of(memory.data()), kSize, true);
    auto medium = std::make_shared<FileMedium>(file.path, kSize, FileMedium::Options{true, true, i % 3 != 2, 8});
    RegionRef remote = far->add_medium(medium->address(), kSize, true, "file", medium);
    std::shared_ptr<SharedFileTransport> near_end, far_end;
    std::shared_ptr<Peer> peer;
    if (is_shared) {
      near_end = std::make_shared<SharedFileTransport>(table, 8, "mooncake-test-" + file.path);
      far_end = std::make_shared<SharedFileTransport>(far, 7, "mooncake-test-far-" + file.path);
      far->listen(far_end);
      Status status;
      peer = near_end->connect(far_end->endpoint(), 7, published(*far), Clock::now() + 5s, status);
      assert(peer && status == Status::kOk);
      assert(!near_end->connect(far_end->endpoint(), 9, {}, Clock::now() + 5s, status));
      std::vector<RemoteRegion> wrong = published(*far);
      wrong[0].key++;
      peer->set_remote(wrong);
      assert(peer->run(request(Op::kRead, {{local->address, remote->address, 9}})).status == Status::kAccessDenied);
      peer->set_remote(published(*far));
    } else {
      peer = std::make_shared<FilePeer>(table, table, published(*table), 2);
      table->listen(peer);
    }
    std::atomic<int> num_done{0}, num_summed{0};
    std::vector<std::thread> threads;
    for (uint64_t part = 0; part < 3; part++)
      threads.emplace_back([&, part] {
        Slice slice{local->address + part * 1'000'001, remote->address + part * 1'000'001, 1'000'001};
        uint32_t sum = crc32c(reinterpret_cast<void*>(slice.local), slice.length);
        num_summed++;
        while (true) {
          Completion done = peer->run(request(part == 2 ? Op::kRead : Op::kWrite, {slice}, true));
          num_done++;
          if (done.status != Status::kOk) return;
          assert(part == 2 || done.checksums[0] == sum);
        }
      });
    auto queue = std::make_shared<Queue>();
    int64_t failed = -1;
    for (uint64_t token = 0; token < 5; token++)
      peer->submit(queue, token, request(Op::kWrite, {{local->address, remote->address + 3'500'000, 500'000}}), failed);
    while (num_done < 6 || num_summed < 3) std::this_thread::yield();
    size_t num_ended = 0;
    while (num_ended < 5) num_ended += queue->drain(5, 10).size();
    bool owner_goes = is_shared && i % 3 == 0, memory_goes = i / 2 % 2;
    if (owner_goes) far_end->close();
    else if (memory_goes) table->remove(local->key);
    else far->remove(remote->key);
    if (memory_goes && !owner_goes) std::fill(memory.begin(), memory.end(), 5);
    for (auto& thread : threads) thread.join();
    peer->close();
    table->remove_all();
    far->remove_all();
  }
}

}  // namespace

int main(int argc, char** argv) {
  unsigned long long seed;
  if (int asked = take_arguments(argc, argv, seed)) rounds = std::max(1, asked / 5);
  Tests tests = {
      {"staging", test_staging},
      {"layouts", test_layouts},
      {"local media", test_local_media},
      {"remote media", test_remote_media},
      {"slow media", test_slow_media},
      {"media without threads", test_media_without_threads},
      {"reasons of staged transfers", test_reasons_of_staged_transfers},
      {"staging of stopped readers", test_staging_of_stopped_readers},
      {"staging ahead is bounded", test_staging_ahead_is_bounded},
      {"ending media", test_ending_media},
      {"rests of parts", test_rests_of_parts},
      {"files", test_files},
      {"file peers", test_file_peers},
  };
  run_all(tests, seed);
}
