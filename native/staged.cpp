// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "crc32c.h"
#include "transport.h"

// Jobs whose local bytes lie in a medium, for transports that know only memory. The job is cut into
// windows; while one travels, the medium already fetches the next or still takes the last.

namespace mooncake {

namespace {

constexpr size_t kWindowChunks = 16;

// Moves by media under way. Waited for without a deadline: a device can't abort them.
class Moves {
 public:
  ~Moves() { wait(); }

  void start(Op op, const Layout::Move& move, uint8_t* memory) {
    {
      std::lock_guard lock(mutex_);
      num_left_++;
    }
    if (!move.region->enter()) return ended({Status::kCancelled}, move.slice);
    move.region->medium->start(op, move.offset, memory, move.length,
                               [this, region = move.region, slice = move.slice](Outcome outcome) {
                                 region->leave();
                                 ended(outcome, slice);
                               });
  }
  Outcome wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return num_left_ == 0; });
    return outcome_;
  }
  size_t failed_slice() const { return failed_slice_; }  // after wait()

 private:
  void ended(Outcome outcome, size_t slice) {
    std::lock_guard lock(mutex_);
    if (outcome.status != Status::kOk && outcome_.status == Status::kOk) outcome_ = outcome, failed_slice_ = slice;
    if (--num_left_ == 0) ended_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  size_t num_left_ = 0;
  Outcome outcome_;
  size_t failed_slice_ = 0;
};

// The slices of a job, window by window.
class Windows {
 public:
  explicit Windows(const Job& job) : job_(job) {}

  // Where the next window lies in its chunks; false when there is none.
  bool next(Layout& layout, std::vector<Layout::Piece>& memory) {
    const auto& slices = job_.request.slices;
    layout.clear(), memory.clear();
    while (slice_ < slices.size()) {
      const Slice& slice = slices[slice_];
      RegionRef region = region_of(slice);
      uint64_t length = slice.length - offset_;
      if (region && region->medium) {
        uint64_t at = slice.local - region->address + offset_;
        length = layout.add(region, at, length, slice_, offset_, kWindowChunks);
      } else if (length) {
        memory.push_back({slice_, offset_, length, 0, 0});
      }
      offset_ += length;
      if (offset_ < slice.length) break;  // the window is full
      slice_++, offset_ = 0;
    }
    return !layout.pieces.empty() || !memory.empty();
  }
  bool is_over() const { return slice_ == job_.request.slices.size(); }

 private:
  RegionRef region_of(const Slice& slice) const {
    if (slice.length == 0) return nullptr;
    auto holds = [&](auto& region) { return region->contains(slice.local, slice.length); };
    auto found = std::find_if(job_.regions.begin(), job_.regions.end(), holds);
    return found == job_.regions.end() ? nullptr : *found;
  }
  const Job& job_;
  size_t slice_ = 0;
  uint64_t offset_ = 0;
};

// All staging memory as one region, for transports that look up where local bytes lie.
const RegionRef& staging_region() {
  static const auto* region = new RegionRef(std::make_shared<Region>(
      reinterpret_cast<uint64_t>(Staging::moving().base()), Staging::size(), random_key(), -1));
  return *region;
}

struct Window {
  Layout layout;
  std::vector<Layout::Piece> memory;
  std::unique_ptr<Moves> moves;
};

}  // namespace

Completion Peer::through_staging(Job& job) {
  const Request& request = job.request;
  const bool is_write = request.op == Op::kWrite;
  Windows windows(job);
  Staging::Lease lease;
  Window window[2];
  Completion completion;
  Checksums sums;

  auto start = [&](Window& which) {
    size_t first = &which == &window[0] ? 0 : kWindowChunks;
    which.moves = std::make_unique<Moves>();
    for (const Layout::Move& move : which.layout.moves)
      which.moves->start(is_write ? Op::kRead : Op::kWrite, move, lease.chunk(first + move.chunk) + move.at);
  };
  auto settle = [&](Window& which) {  // false: the medium failed
    if (!which.moves) return true;
    Outcome outcome = which.moves->wait();
    if (outcome.status == Status::kOk) return true;
    completion = job.failed(outcome.status, static_cast<int64_t>(which.moves->failed_slice()), outcome.error);
    return false;
  };
  auto travel = [&](Window& which) {
    size_t first = &which == &window[0] ? 0 : kWindowChunks;
    Job part(Request{request.op, {}, request.checksum, request.deadline});
    part.regions = job.regions;
    part.regions.push_back(staging_region());
    std::vector<Layout::Piece> pieces = which.layout.pieces;
    pieces.insert(pieces.end(), which.memory.begin(), which.memory.end());
    for (size_t i = 0; i < pieces.size(); i++) {
      const Layout::Piece& piece = pieces[i];
      const Slice& slice = request.slices[piece.slice];
      bool is_staged = i < which.layout.pieces.size();
      uint64_t local = is_staged ? reinterpret_cast<uint64_t>(lease.chunk(first + piece.chunk) + piece.at)
                                 : slice.local + piece.offset;
      part.request.slices.push_back({local, slice.remote + piece.offset, piece.length});
      part.keys.push_back(job.keys[piece.slice]);
    }
    Completion moved = execute_part(job, part);
    if (moved.status != Status::kOk) {
      auto row = static_cast<size_t>(moved.failed_slice);
      int64_t failed = moved.failed_slice < 0 ? -1 : static_cast<int64_t>(pieces[row].slice);
      completion = job.failed(moved.status, failed, moved.error);
      completion.reason = std::move(moved.reason);
      return false;
    }
    completion.num_bytes += moved.num_bytes;
    for (size_t i = 0; i < moved.checksums.size(); i++)
      sums.add(pieces[i].slice, pieces[i].offset, pieces[i].length, moved.checksums[i]);
    return true;
  };

  bool has_more = windows.next(window[0].layout, window[0].memory);
  // All at once, so that no job waits for staging while it holds some.
  size_t num_chunks = windows.is_over() ? window[0].layout.num_chunks() : 2 * kWindowChunks;
  if (num_chunks && !Staging::moving().take(num_chunks, request.deadline, job.stop, lease))
    return job.failed(job.stop.load() == Status::kOk ? Status::kTimedOut : job.stop.load());
  if (is_write) start(window[0]);
  for (size_t turn = 0; has_more; turn++) {
    Window &now = window[turn % 2], &other = window[(turn + 1) % 2];
    if (is_write) {
      has_more = windows.next(other.layout, other.memory);
      if (has_more) start(other);
      if (!settle(now) || !travel(now)) return completion;
    } else {
      if (!travel(now)) return completion;
      start(now);
      if (!settle(other)) return completion;
      has_more = windows.next(other.layout, other.memory);
    }
    if (has_more && job.is_late()) return job.failed(Status::kTimedOut);
  }
  if (!is_write && (!settle(window[0]) || !settle(window[1]))) return completion;
  if (request.checksum) completion.checksums = sums.per_slice(request.slices.size());
  return completion;
}

}  // namespace mooncake
