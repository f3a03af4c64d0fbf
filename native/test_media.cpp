// Tests of media below Python, for the sanitizers: staging, layouts, and transfers whose local or remote
// bytes lie in a medium. A fixed seed unless one is given.
//
//     test_media [seed] [rounds]

#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "crc32c.h"
#include "tcp.h"

using namespace mooncake;
using namespace std::chrono_literals;

namespace {

std::mt19937_64 rng(1);
int rounds = 60;

uint64_t below(uint64_t limit) { return limit ? rng() % limit : 0; }

std::vector<uint8_t> noise(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  return bytes;
}

uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

Request request(Op op, std::vector<Slice> slices, bool checksum = false, Clock::duration patience = 20s) {
  return {op, std::move(slices), checksum, Clock::now() + patience};
}

std::vector<RemoteRegion> published(const RegionTable& table) {
  std::vector<RemoteRegion> regions;
  for (const RegionRef& region : table.all()) regions.push_back({region->address, region->size, region->key});
  return regions;
}

// Bytes in a vector that nobody may reach by the region's addresses; fails or stalls when told to.
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

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  if (argc > 2) rounds = std::max(1, std::atoi(argv[2]) / 5);
  rng.seed(seed);
  std::pair<const char*, std::function<void()>> tests[] = {
      {"staging", test_staging},
      {"layouts", test_layouts},
      {"local media", test_local_media},
  };
  for (auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    test();
  }
  std::printf("all passed (seed %llu)\n", static_cast<unsigned long long>(seed));
}
