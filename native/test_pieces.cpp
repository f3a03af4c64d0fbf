// SPDX-License-Identifier: Apache-2.0
// Submitted jobs in pieces, without a transport: what is cut, what overtakes what, what a cancellation
// leaves behind. For scripts/sanitize. Plain asserts.
//
//     test_pieces [seed] [rounds]

#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "crc32c.h"
#include "pieces.h"
#include "testing.h"

using namespace mooncake;
using namespace std::chrono_literals;

namespace {

constexpr uint64_t kFar = uint64_t{1} << 40;  // where the imagined peer's memory begins

// Carries by looking: notes what it was given, waits at a gate, touches nothing.
class Recorder final : public Peer {
 public:
  explicit Recorder(std::shared_ptr<RegionTable> regions, int max_workers = 1)
      : Peer(std::move(regions), {{kFar, kFar, 7}}, max_workers) {}

  void open_gate(int num_pieces) {
    std::lock_guard lock(gate_mutex_);
    allowed_ += num_pieces;
    gate_.notify_all();
  }
  void wait_for_piece(size_t number) {
    std::unique_lock lock(gate_mutex_);
    gate_.wait(lock, [&] { return seen.size() >= number; });
  }
  size_t num_begun() {
    std::lock_guard lock(gate_mutex_);
    return seen.size();
  }
  std::vector<Slice> seen;  // the first slice of each piece, in the order in which they were begun
  uint64_t num_bytes = 0;

 protected:
  Completion execute(Job& job) override {
    std::unique_lock lock(gate_mutex_);
    seen.push_back(job.request.slices.front());
    gate_.notify_all();
    while (allowed_ == 0 && job.stop.load() == Status::kOk) gate_.wait_for(lock, 1ms);
    if (job.stop.load() != Status::kOk) return job.failed(job.stop.load(), 0);
    allowed_--;
    Completion completion;
    for (size_t i = 0; i < job.request.slices.size(); i++) {
      const Slice& slice = job.request.slices[i];
      completion.num_bytes += slice.length;
      if (job.request.checksum)
        completion.checksums.push_back(crc32c(reinterpret_cast<const void*>(slice.local), slice.length));
    }
    num_bytes += completion.num_bytes;
    return completion;
  }

 private:
  std::mutex gate_mutex_;
  std::condition_variable gate_;
  int allowed_ = 0;
};

struct Bench {
  explicit Bench(uint64_t size, int max_workers = 1) : memory(size), table(std::make_shared<RegionTable>()) {
    for (size_t i = 0; i < size; i += 997) memory[i] = static_cast<uint8_t>(i / 997);
    start = reinterpret_cast<uint64_t>(memory.data());
    table->add(start, size, true);
    peer = std::make_shared<Recorder>(table, max_workers);
    table->listen(peer);
    queue = std::make_shared<Queue>();
  }
  ~Bench() { peer->close(); }
  void submit(uint64_t token, std::vector<Slice> slices, int priority, bool reports = false, bool checksum = false,
              Clock::duration patience = 60s) {
    int64_t failed = -1;
    Status status = peer->submit(
        queue, token, {Op::kWrite, std::move(slices), checksum, Clock::now() + patience, priority, reports}, failed);
    assert(status == Status::kOk && failed == -1);
  }
  Completion next() {
    auto drained = queue->drain(1, 60);
    assert(drained.size() == 1);
    return drained[0];
  }

  std::vector<uint8_t> memory;
  uint64_t start;
  std::shared_ptr<RegionTable> table;
  std::shared_ptr<Recorder> peer;
  QueueRef queue;
};

void test_an_urgent_job_goes_between_pieces() {
  Bench bench(3 * kPieceBytes);
  bench.submit(1, {{bench.start, kFar, 3 * kPieceBytes}}, 0, true);
  bench.peer->wait_for_piece(1);
  bench.submit(2, {{bench.start, kFar + 2, 10}}, 0);
  bench.submit(3, {{bench.start, kFar + 3, 10}}, 1);
  bench.submit(4, {{bench.start, kFar + 4, 10}}, 5);
  bench.submit(5, {{bench.start, kFar + 5, 10}}, 1);
  bench.peer->open_gate(100);
  std::vector<uint64_t> ends, partial;
  while (ends.size() < 5) {
    Completion completion = bench.next();
    assert(completion.status == Status::kOk);
    if (completion.is_partial) {
      assert(completion.token == 1);
      partial.push_back(completion.num_bytes);
    } else {
      ends.push_back(completion.token);
      assert(completion.num_bytes == (completion.token == 1 ? 3 * kPieceBytes : 10));
    }
  }
  assert((ends == std::vector<uint64_t>{4, 3, 5, 1, 2}));
  assert((partial == std::vector<uint64_t>{kPieceBytes, 2 * kPieceBytes}));
  assert(bench.peer->seen[4].remote == kFar + kPieceBytes);  // the first job went on where it was
}

void test_a_cancellation_between_pieces_is_final() {
  for (int when = 0; when < 3; when++) {
    Bench bench(4 * kPieceBytes);
    bench.submit(1, {{bench.start, kFar, 4 * kPieceBytes}}, 0);
    bench.submit(2, {{bench.start, kFar, 2 * kPieceBytes}}, 0);
    bench.peer->wait_for_piece(1);
    bench.peer->open_gate(when);
    if (when == 2) bench.table->remove(bench.table->all()[0]->key);
    else bench.peer->cancel();
    size_t begun = bench.peer->num_begun();
    Completion first = bench.next(), second = bench.next();
    assert(first.status == Status::kCancelled);
    assert(second.status == Status::kCancelled && !first.is_partial && !second.is_partial);
    bench.peer->open_gate(10);
    std::this_thread::sleep_for(2ms);
    if (when != 2) assert(bench.peer->num_begun() == begun);
  }
}

void test_empty_slices_are_no_piece_of_their_own() {
  Bench bench(2 * kPieceBytes);
  bench.peer->open_gate(100);
  bench.submit(1, {{bench.start, kFar, 2 * kPieceBytes}, {bench.start, kFar, 0}, {bench.start, kFar, 0}}, 0, false,
               true);
  Completion done = bench.next();
  assert(done.status == Status::kOk && done.num_bytes == 2 * kPieceBytes && done.checksums.size() == 3);
  assert(done.checksums[1] == 0 && done.checksums[2] == 0);
  assert(bench.peer->seen.size() == 2);
}

// A job that no thread can carry ends with a reason, and neither the next one nor close() waits for it.
void test_jobs_without_a_thread_end() {
  Bench bench(100, 2);
  {
    testing::NoThreads none;
    bench.submit(1, {{bench.start, kFar, 10}}, 0);
  }
  Completion done = bench.next();
  assert(done.token == 1 && done.status == Status::kIoError && done.error == EAGAIN && !done.reason.empty());
  bench.submit(2, {{bench.start, kFar, 10}}, 0);
  bench.peer->wait_for_piece(1);
  {
    testing::NoThreads none;  // there is one thread, which carries the next job after its own
    bench.submit(3, {{bench.start, kFar, 10}}, 0);
  }
  bench.peer->open_gate(2);
  for (uint64_t token : {2, 3}) {
    done = bench.next();
    assert(done.token == token && done.status == Status::kOk);
  }
}

// While the worker is busy with a peer that hangs, jobs end when their time is over.
void test_late_jobs_end_in_the_queue() {
  Bench bench(100);
  bench.submit(1, {{bench.start, kFar, 10}}, 0);
  bench.peer->wait_for_piece(1);
  bench.submit(2, {{bench.start, kFar, 10}}, 0, false, false, 30ms);
  bench.submit(3, {{bench.start, kFar, 10}}, 9);
  bench.submit(4, {{bench.start, kFar, 10}}, 5, false, false, 10ms);
  uint64_t ended = 0;
  for (int i = 0; i < 2; i++) {
    Completion done = bench.next();
    assert(done.status == Status::kTimedOut && !done.is_partial);
    ended += done.token;
  }
  assert(ended == 2 + 4);
  bench.submit(5, {{bench.start, kFar, 10}}, 0, false, false, 10ms);  // one that is watched from the start
  assert(bench.next().token == 5);
  bench.peer->open_gate(2);
  for (uint64_t token : {1, 3}) {
    Completion done = bench.next();
    assert(done.token == token && done.status == Status::kOk);
  }
}

// So does one that has begun and waits for a more urgent one to end.
void test_a_late_job_ends_between_its_pieces() {
  Bench bench(3 * kPieceBytes);
  bench.submit(1, {{bench.start, kFar, 3 * kPieceBytes}}, 0, false, false, 1s);
  bench.peer->wait_for_piece(1);
  bench.submit(2, {{bench.start, kFar, 10}}, 5);
  bench.peer->open_gate(1);
  Completion done = bench.next();
  assert(done.token == 1 && done.status == Status::kTimedOut);
  bench.peer->open_gate(1);
  done = bench.next();
  assert(done.token == 2 && done.status == Status::kOk);
}

// Two operations with the same memory, each with a brief registration of its own: the end of one does not end the
// other, whose job may work on either.
void test_the_end_of_a_brief_region_ends_no_job_of_another() {
  Bench bench(1000);
  RegionRef mine = bench.table->add(bench.start, 1000, true, true);
  RegionRef other = bench.table->add(bench.start, 1000, true, true);
  bench.submit(1, {{bench.start, kFar, 1000}}, 0);
  bench.submit(2, {{bench.start, kFar, 1000}}, 0);
  bench.peer->wait_for_piece(1);
  bench.table->remove(other->key);
  bench.peer->open_gate(2);
  for (uint64_t token : {1, 2}) {
    Completion done = bench.next();
    assert(done.token == token && done.status == Status::kOk);
  }
  bench.table->remove(mine->key);
  assert(mine->is_closed() && other->is_closed());  // no job was left that has ended
}

void test_random_jobs_end_once_and_right(uint64_t seed) {
  std::mt19937_64 rng(seed);
  Bench bench(2 * kPieceBytes + 4321, 2);
  bench.peer->open_gate(1 << 20);
  std::vector<std::vector<Slice>> jobs;
  uint64_t total = 0;
  for (uint64_t token = 0; token < 12; token++) {
    std::vector<Slice> slices;
    for (uint64_t count = 1 + rng() % 5; count > 0; count--) {
      uint64_t length = rng() % 4 ? rng() % 100'000 : rng() % bench.memory.size();
      if (rng() % 7 == 0) length = 0;
      uint64_t offset = rng() % (bench.memory.size() - length + 1);
      slices.push_back({bench.start + offset, kFar + offset, length});
      total += length;
    }
    jobs.push_back(slices);
    bench.submit(token, slices, static_cast<int>(rng() % 3) - 1, rng() % 2, true);
  }
  std::vector<uint64_t> so_far(jobs.size(), 0);
  for (size_t ended = 0; ended < jobs.size();) {
    Completion completion = bench.next();
    const auto& slices = jobs[completion.token];
    assert(completion.status == Status::kOk && completion.num_bytes >= so_far[completion.token]);
    so_far[completion.token] = completion.num_bytes;
    if (completion.is_partial) continue;
    ended++;
    uint64_t num_bytes = 0;
    for (size_t i = 0; i < slices.size(); i++) {
      num_bytes += slices[i].length;
      uint32_t wanted = crc32c(reinterpret_cast<const void*>(slices[i].local), slices[i].length);
      assert(completion.checksums.at(i) == wanted);
    }
    assert(completion.num_bytes == num_bytes);
  }
  assert(bench.peer->num_bytes == total);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1;
  int rounds = argc > 2 ? atoi(argv[2]) : 300;
  test_an_urgent_job_goes_between_pieces();
  test_a_cancellation_between_pieces_is_final();
  test_empty_slices_are_no_piece_of_their_own();
  test_jobs_without_a_thread_end();
  test_late_jobs_end_in_the_queue();
  test_a_late_job_ends_between_its_pieces();
  test_the_end_of_a_brief_region_ends_no_job_of_another();
  for (int round = 0; round < rounds / 30 + 1; round++) test_random_jobs_end_once_and_right(seed * 1000 + round);
  printf("pieces: all well (seed %llu)\n", static_cast<unsigned long long>(seed));
}
