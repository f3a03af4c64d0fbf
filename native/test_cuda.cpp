// SPDX-License-Identifier: Apache-2.0
// Tests of device memory below Python, for the sanitizers. The driver is a double over main memory
// (test_cuda_driver.cpp says what it shows and what it cannot): these tests are about our side, plans,
// waits, ranges, lifetimes and what happens between processes, not about a GPU.
//
//     test_cuda [seed] [rounds]
//     test_cuda serve             a process that exposes device memory, until its input ends

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "crc32c.h"
#include "cuda_ipc.h"
#include "testing.h"

using namespace mooncake;
using namespace mooncake::testing;
using namespace mooncake::cuda;
using namespace std::chrono_literals;

namespace {

int rounds = 60;
constexpr const char* kDouble = MOONCAKE_CUDA_DOUBLE;

std::shared_ptr<Cuda> open_double() {
  std::string why;
  std::shared_ptr<Cuda> cuda = Cuda::open(kDouble, why);
  if (!cuda) std::fprintf(stderr, "%s\n", why.c_str());
  assert(cuda);
  return cuda;
}

struct Held {
  int own, opened, pinned, streams;
};

Held held() {
  void* library = dlopen(kDouble, RTLD_NOW | RTLD_NOLOAD);
  assert(library);
  auto ask = reinterpret_cast<void (*)(int*, int*, int*, int*)>(dlsym(library, "double_counts"));
  Held held;
  ask(&held.own, &held.opened, &held.pinned, &held.streams);
  dlclose(library);
  return held;
}

std::vector<uint8_t> bytes_of(const RegionRef& region) {
  std::vector<uint8_t> bytes(region->size);
  assert(region->medium->read(0, bytes.data(), bytes.size()).status == Status::kOk);
  return bytes;
}

void put(const RegionRef& region, const std::vector<uint8_t>& bytes) {
  assert(region->medium->write(0, bytes.data(), bytes.size()).status == Status::kOk);
}

// Plans -----------------------------------------------------------------------------------------------

void test_plans() {
  for (int i = 0; i < rounds * 5; i++) {
    std::vector<Piece> pieces(below(20));
    uint64_t device = 1'000'000, total = 0;
    for (size_t j = 0; j < pieces.size(); j++) {
      pieces[j] = {1'000 * j, device, below(3) ? below(300) : 0};
      total += pieces[j].length;
      device += pieces[j].length + (below(2) ? below(50) : 0);
    }
    uint64_t capacity = 1 + below(200);
    Stager stager(pieces, capacity);
    Fill fill;
    std::vector<uint64_t> moved(pieces.size());
    while (stager.next(fill)) {
      std::vector<uint64_t> goes_to(capacity, 0);  // the device address of each byte of the buffer
      uint64_t used = 0;
      for (const Fill::Copy& copy : fill.copies)
        for (uint64_t at = 0; at < copy.length; at++) goes_to[copy.at + at] = copy.device + at;
      for (const Fill::Part& part : fill.parts) {
        assert(part.at == used && part.length > 0 && part.offset == moved[part.piece]);
        for (uint64_t at = 0; at < part.length; at++)
          assert(goes_to[part.at + at] == pieces[part.piece].device + part.offset + at);
        moved[part.piece] += part.length, used += part.length;
      }
      assert(used <= capacity && fill.copies.size() <= fill.parts.size());
      total -= used;
    }
    assert(total == 0);
    for (size_t j = 0; j < pieces.size(); j++) assert(moved[j] == pieces[j].length);
  }
  std::vector<Piece> neighbours{{10, 100, 5}, {90, 105, 7}, {50, 200, 1}};
  Stager stager(neighbours, 1000);
  Fill fill;
  assert(stager.next(fill) && fill.parts.size() == 3 && fill.copies.size() == 2 && fill.copies[0].length == 12);
  assert(!stager.next(fill));
  std::vector<Piece> small{{0, 0, 10}}, big{{0, 0, 1 << 30}};
  assert(staging_bytes(small) == 128 << 10 && staging_bytes(big) == 2 << 20);
  std::vector<Hop> hops{{0, 100, 10}, {10, 110, 5}, {15, 0, 0}, {15, 116, 1}, {16, 117, 1}};
  std::vector<Hop> fewer = joined(hops);
  assert(fewer.size() == 2 && fewer[0].length == 15 && fewer[1].to == 15 && fewer[1].length == 2);
  assert(lies_within(0, 10, 10) && lies_within(9, 1, 10) && !lies_within(9, 2, 10) && !lies_within(10, 1, 10));
  assert(!lies_within(UINT64_MAX, 2, 10) && !lies_within(1, UINT64_MAX, 10));
}

void test_what_is_no_driver() {
  std::string why;
  assert(!Cuda::open("libcuda-nowhere.so.1", why) && why.find("libcuda-nowhere.so.1") != std::string::npos);
  assert(!Cuda::open("libc.so.6", why) && why.find("has no cuInit") != std::string::npos);
  std::vector<uint8_t> memory(10);
  assert(!Cuda::is_device_memory("libcuda-nowhere.so.1", address_of(memory.data())));
  auto cuda = open_double();
  assert(cuda == open_double() && cuda->devices().size() == 2 && cuda->devices()[1].bus_id == "0000:db:00.0");
  assert(!Cuda::is_device_memory(kDouble, address_of(memory.data())));
}

// Memory ----------------------------------------------------------------------------------------------

void test_regions() {
  auto cuda = open_double();
  Held before = held();
  {
    RegionTable table;
    std::string why;
    RegionRef region = cuda->allocate(table, 1, 10'000, why);
    assert(region && region->kind == "cuda:1" && region->is_shared() && region->fd < 0);
    assert(bytes_of(region) == std::vector<uint8_t>(10'000, 0));
    assert(Cuda::is_device_memory(kDouble, region->address + 9'999));
    RegionRef part = cuda->add(table, region->address + 100, 50, false, why);
    assert(part && part->kind == "cuda:1" && device_memory(*part)->shown->offset == 100);
    std::vector<uint8_t> host(100);
    assert(!cuda->add(table, address_of(host.data()), 100, true, why) && !why.empty());
    assert(!cuda->add(table, region->address + 9'990, 20, true, why));
    assert(!cuda->allocate(table, 0, 1ull << 40, why) && why.find("memory") != std::string::npos);
    uint64_t offset = 0;
    int fd = cuda->dma_buf(region->address + 5'000, 100, offset);
    assert(fd >= 0 && offset == 5'000 - 4'096);
    close(fd);
    table.remove_all();
  }
  Held after = held();
  assert(before.own == after.own && before.opened == after.opened);
}

void test_copies() {
  auto cuda = open_double();
  RegionTable table;
  std::string why;
  const uint64_t size = 3'000'000;
  RegionRef device = cuda->allocate(table, 0, size, why), other = cuda->allocate(table, 1, size, why);
  for (int i = 0; i < rounds / 2; i++) {
    bool is_pinned = i % 2, has_sums = i % 3;
    std::vector<uint8_t> here = noise(size), before = bytes_of(device), expected = before;
    RegionRef local = table.add(address_of(here.data()), size, true);
    assert(!cuda->is_pinned(*local));
    if (is_pinned) assert(cuda->pin(*local).empty() && cuda->is_pinned(*local));
    std::vector<Piece> pieces;
    for (uint64_t at = below(100); at < size && pieces.size() < 700;) {
      uint64_t length = std::min(below(i % 5 ? 20'000 : 2'000'000), size - at);
      pieces.push_back({local->address + at, device->address + at, length});
      std::copy_n(&here[at], length, &expected[at]);
      at += length + (below(2) ? below(9) : 0);
    }
    std::vector<uint32_t> sums(pieces.size(), 7);
    uint32_t* asked = has_sums ? sums.data() : nullptr;
    assert(cuda->copy(0, Toward::kDevice, pieces, is_pinned, asked) == kSuccess);
    auto are_right = [&] {
      for (size_t j = 0; j < pieces.size() && has_sums; j++)
        assert(sums[j] == crc32c(reinterpret_cast<void*>(pieces[j].host), pieces[j].length));
    };
    are_right();
    assert(bytes_of(device) == expected);
    std::vector<uint8_t> sent = here;
    std::fill(here.begin(), here.end(), 0);
    std::fill(sums.begin(), sums.end(), 7);
    assert(cuda->copy(0, Toward::kHost, pieces, is_pinned, asked) == kSuccess);
    are_right();
    for (const Piece& piece : pieces) {
      uint64_t at = piece.host - local->address;
      assert(std::memcmp(&here[at], &sent[at], piece.length) == 0);
      std::memset(&here[at], 0, piece.length);
    }
    assert(here == std::vector<uint8_t>(size, 0));  // nothing between the pieces was touched
    std::vector<Hop> hops;
    for (const Piece& piece : pieces)
      hops.push_back({other->address + (piece.device - device->address), piece.device, piece.length});
    put(other, before);
    assert(cuda->copy_between(1, 0, hops) == kSuccess);
    assert(bytes_of(other) == expected);
    table.remove(local->key);
    assert(!cuda->is_pinned(*local));
  }
  std::vector<uint8_t> few(100);
  std::vector<Piece> outside{{address_of(few.data()), device->address + size - 50, 100}};
  assert(cuda->copy(0, Toward::kHost, outside, false, nullptr) != kSuccess);
  assert(device->medium->read(size - 50, few.data(), 100).status == Status::kIoError);
  table.remove_all();
}

// Between processes -----------------------------------------------------------------------------------

struct Pair {
  static constexpr uint64_t kSize = 300'000;
  std::shared_ptr<Cuda> cuda = open_double();
  std::shared_ptr<RegionTable> near = std::make_shared<RegionTable>(), far = std::make_shared<RegionTable>();
  std::vector<uint8_t> here = noise(kSize);
  RegionRef local = near->add(address_of(here.data()), kSize, true), local_device, remote;
  std::shared_ptr<CudaTransport> near_end, far_end;
  std::shared_ptr<SharingPeer> peer;

  explicit Pair(int device = 0) {
    std::string why;
    local_device = cuda->allocate(*near, device, kSize, why);
    remote = cuda->allocate(*far, 0, kSize, why);
    far_end = std::make_shared<CudaTransport>(cuda, far, 7);
    near_end = std::make_shared<CudaTransport>(cuda, near, 8);
    far->listen(far_end);
    Status status;
    peer = near_end->connect(far_end->endpoint(), 7, published(*far), Clock::now() + 5s, status);
    assert(peer && status == Status::kOk);
  }
  ~Pair() {
    peer->close();
    near->remove_all();
    far->remove_all();
  }
};

void test_moving() {
  for (int device = 0; device < 2; device++) {
    Pair pair(device);
    for (int i = 0; i < rounds / 6; i++) {
      const RegionRef& local = i % 2 ? pair.local : pair.local_device;
      std::vector<uint8_t> data = noise(Pair::kSize), expected(Pair::kSize, 0);
      if (i % 2) pair.here = data;
      else put(local, data);
      put(pair.remote, expected);
      std::vector<Slice> slices;
      for (uint64_t at = below(50); at < Pair::kSize;) {
        uint64_t length = std::min(below(i % 3 ? 900 : 60'000), Pair::kSize - at);
        slices.push_back({local->address + at, pair.remote->address + at, length});
        std::copy_n(&data[at], length, &expected[at]);
        at += length + below(9);
      }
      Completion sent = pair.peer->run(request(Op::kWrite, slices, true));
      assert(sent.status == Status::kOk && sent.checksums.size() == slices.size());
      assert(bytes_of(pair.remote) == expected);
      for (size_t j = 0; j < slices.size(); j++)
        assert(sent.checksums[j] == crc32c(&data[slices[j].local - local->address], slices[j].length));
      Completion received = pair.peer->run(request(Op::kRead, slices, true));
      assert(received.status == Status::kOk && received.checksums == sent.checksums);
      assert((i % 2 ? pair.here : bytes_of(local)) == data);
    }
    Slice fine{pair.local->address, pair.remote->address, 10};
    Slice outside{pair.local->address, pair.remote->address + Pair::kSize - 5, 10};
    pair.peer->set_remote({{pair.remote->address, Pair::kSize * 2, pair.remote->key}});  // claims too much
    Completion done = pair.peer->run(request(Op::kWrite, {fine, outside}));
    assert(done.status == Status::kAccessDenied && done.failed_slice == 1);
    pair.peer->set_remote({{pair.remote->address, Pair::kSize, pair.remote->key ^ 1}});
    assert(pair.peer->run(request(Op::kRead, {fine})).status == Status::kAccessDenied);
  }
}

// Device memory that its owner registered read-only is read by peers, and written by none.
void test_read_only_memory() {
  Pair pair;
  std::string why;
  put(pair.remote, noise(Pair::kSize));
  std::vector<uint8_t> before = bytes_of(pair.remote);
  RegionRef secret = pair.cuda->add(*pair.far, pair.remote->address, 1000, false, why);
  assert(secret);
  pair.peer->set_remote({{secret->address, secret->size, secret->key}});  // whatever a descriptor says of it
  for (const RegionRef& local : {pair.local, pair.local_device}) {
    Slice slice{local->address, secret->address, 1000};
    Completion done = pair.peer->run(request(Op::kWrite, {slice}));
    assert(done.status == Status::kAccessDenied && done.failed_slice == 0 && bytes_of(pair.remote) == before);
    assert(pair.peer->run(request(Op::kRead, {slice})).status == Status::kOk);
  }
  assert(std::equal(before.begin(), before.begin() + 1000, pair.here.begin()));
}

// Regions close and jobs are cancelled under traffic: afterwards nothing touches them.
void test_ending() {
  for (int i = 0; i < rounds / 10; i++) {
    Pair pair;
    std::atomic<bool> is_over{false};
    std::atomic<int> num_done{0};
    std::vector<std::thread> threads;
    for (uint64_t part = 0; part < 3; part++)
      threads.emplace_back([&, part] {
        const RegionRef& local = part == 1 ? pair.local_device : pair.local;
        while (!is_over) {
          uint64_t size = Pair::kSize / 4, at = part * size;
          Slice slice{local->address + at, pair.remote->address + at, size};
          Status status = pair.peer->run(request(part ? Op::kWrite : Op::kRead, {slice})).status;
          num_done++;
          if (status != Status::kOk && status != Status::kCancelled) return;
        }
      });
    while (num_done < 12) std::this_thread::yield();
    switch (i % 3) {
      case 0:
        pair.near->remove(pair.local->key);
        std::fill(pair.here.begin(), pair.here.end(), 5);  // a late touch would be a race
        is_over = true;
        break;
      case 1:
        pair.far->remove(pair.remote->key);  // the threads end by themselves: access is denied
        break;
      default:
        pair.peer->cancel();
        is_over = true;
    }
    for (auto& thread : threads) thread.join();
  }
}

struct Exposed {
  char endpoint[64];
  uint64_t address, size, key;
};

void serve() {
  auto cuda = open_double();
  auto table = std::make_shared<RegionTable>();
  std::string why;
  RegionRef whole = cuda->allocate(*table, 0, 200'000, why);
  RegionRef region = cuda->add(*table, whole->address + 5'000, 100'000, true, why);
  auto end = std::make_shared<CudaTransport>(cuda, table, 7);
  table->listen(end);
  Exposed exposed{{}, region->address, region->size, region->key};
  end->endpoint().copy(exposed.endpoint, sizeof exposed.endpoint - 1);
  assert(write(1, &exposed, sizeof exposed) == sizeof exposed);
  char letter;
  while (read(0, &letter, 1) == 1) {
    if (letter == 'u') table->remove(region->key);
    assert(write(1, &letter, 1) == 1);
  }
  table->remove_all();
}

struct OtherProcess {
  int to[2], from[2];
  pid_t pid;
  Exposed exposed;

  explicit OtherProcess(const char* program) {
    assert(pipe(to) == 0 && pipe(from) == 0);
    pid = fork();
    if (pid == 0) {
      dup2(to[0], 0), dup2(from[1], 1);
      for (int fd : {to[0], to[1], from[0], from[1]}) close(fd);
      execl(program, program, "serve", nullptr);
      _exit(1);
    }
    close(to[0]), close(from[1]);
    assert(read(from[0], &exposed, sizeof exposed) == sizeof exposed);
  }
  void say(char letter) const { assert(write(to[1], &letter, 1) == 1 && read(from[0], &letter, 1) == 1); }
  ~OtherProcess() {
    close(to[1]), close(from[0]);
    int status;
    waitpid(pid, &status, 0);
  }
};

// An allocation of another process is opened once, and closed when its last region is taken back.
void test_processes(const char* program) {
  auto cuda = open_double();
  for (int i = 0; i < 3; i++) {
    OtherProcess other(program);
    auto near = std::make_shared<RegionTable>();
    std::vector<uint8_t> here = noise(100'000), sent = here;
    RegionRef local = near->add(address_of(here.data()), here.size(), true);
    auto end = std::make_shared<CudaTransport>(cuda, near, 8);
    Status status;
    std::vector<RemoteRegion> remote{{other.exposed.address, other.exposed.size, other.exposed.key}};
    auto peer = end->connect(other.exposed.endpoint, 7, remote, Clock::now() + 5s, status);
    assert(peer);
    Slice all{local->address, other.exposed.address, 100'000};
    assert(peer->run(request(Op::kWrite, {all}, true)).status == Status::kOk && held().opened == 1);
    std::fill(here.begin(), here.end(), 0);
    Completion done = peer->run(request(Op::kRead, {all}, true));
    assert(done.status == Status::kOk && here == sent && done.checksums[0] == crc32c(sent.data(), sent.size()));
    if (i == 0) {
      other.say('u');
      assert(peer->run(request(Op::kRead, {all})).status == Status::kAccessDenied && held().opened == 0);
    } else if (i == 1) {
      kill(other.pid, SIGKILL);
      while (peer->run(request(Op::kRead, {all})).status != Status::kPeerLost) std::this_thread::yield();
      while (held().opened) std::this_thread::yield();
    }
    peer->close();
    assert(held().opened == 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "serve") == 0) return serve(), 0;
  unsigned long long seed;
  if (int asked = take_arguments(argc, argv, seed)) rounds = std::max(6, asked / 5);
  Tests tests = {
      {"plans", test_plans},     {"what is no driver", test_what_is_no_driver},
      {"regions", test_regions}, {"copies", test_copies},
      {"moving", test_moving},   {"read-only memory", test_read_only_memory},
      {"ending", test_ending},   {"processes", [&] { test_processes(argv[0]); }},
  };
  run_all(tests, seed, "cuda (double): ");
}
