// SPDX-License-Identifier: Apache-2.0
// Bytes that lie where the processor does not reach them by address: in a file, on a device. A region
// with a medium is addressed like any other (address + offset), but there is no memory to touch there; its
// bytes are moved by its medium, to and from plain memory.
//
// A move between a medium and a socket needs memory between: Staging is that memory, one fixed block
// per role and process, so that what is in flight is bounded and a medium may register or pin it once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "slice.h"

namespace mooncake {

struct Outcome {
  Status status = Status::kOk;
  int error = 0;  // with kIoError: the errno that says what went wrong
};

std::string reason_of(int error);  // for people, and what to do

class Medium {
 public:
  using Done = std::function<void(Outcome)>;
  virtual ~Medium();

  // Offsets count from the region's address; any alignment. Both block, both may be called from many
  // threads at once, and neither is called with bytes outside the region. The caller keeps the region
  // entered (Touch) meanwhile.
  virtual Outcome read(uint64_t offset, void* into, uint64_t length) = 0;
  virtual Outcome write(uint64_t offset, const void* from, uint64_t length) = 0;

  // The same for event loops: returns at once, `done` is called exactly once, from any thread, perhaps the
  // caller's before this returns. The caller keeps memory and region (entered) until then; `done` may drop the
  // last reference to both.
  // As it stands, it hands read() and write() to a few threads of this medium.
  virtual void start(Op op, uint64_t offset, void* memory, uint64_t length, Done done);

  // Other processes of this host can open it, if a transport shows it to them.
  virtual bool is_shared() const { return false; }

  // What was written survives a loss of power.
  virtual Outcome flush() { return {}; }

  // Makes sure that there is room for these bytes; where the file system cannot reserve it, writing may still fail.
  virtual Outcome provide(uint64_t /*offset*/, uint64_t /*length*/) { return {}; }

  // Memory whose address equals the offset modulo this spares a copy. A power of two, at most 4096.
  virtual uint64_t alignment() const { return 1; }

 protected:
  // Runs `task` on a thread of this medium, of which there are at most `max_threads`. False: the system gives
  // none, and the task is dropped.
  bool hand_over(std::function<void()> task, int max_threads = 4);

 private:
  struct Workers;
  std::shared_ptr<Workers> workers_;
  std::mutex mutex_;  // of workers_ itself
};

// A fixed block of page-aligned memory, given out in chunks.
class Staging {
 public:
  static constexpr uint64_t kChunk = 256 << 10;
  static constexpr size_t kNumChunks = 256;  // 64 MiB of address space; memory only where it was used

  static Staging& serving();  // of servers, for peers
  static Staging& moving();   // of jobs of this process

  uint8_t* base() const { return base_; }
  static constexpr uint64_t size() { return kChunk * kNumChunks; }

  // Chunks, given back when the lease ends.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : chunks_(std::move(other.chunks_)), from_(other.from_) { other.chunks_.clear(); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    size_t size() const { return chunks_.size(); }
    uint8_t* chunk(size_t i) const { return from_->base() + chunks_[i] * kChunk; }

   private:
    friend class Staging;
    std::vector<size_t> chunks_;
    Staging* from_ = nullptr;
  };

  // A place in the queue for `count` chunks (at most kNumChunks): all of them or none, in order of
  // asking, so that a holder of some never waits for more.
  struct Want {
    size_t count = 0;
    std::function<void()> wake{};  // called once, from any thread, when `lease` has been filled later
    Lease lease{};
    bool is_given = false;  // both guarded by the staging's mutex until wake was called
  };
  bool take(const std::shared_ptr<Want>& want);  // true: at once, wake is not called
  // Waits; false: too late, or `stop` says otherwise than kOk.
  bool take(size_t count, Clock::time_point deadline, const std::atomic<Status>& stop, Lease& lease);
  bool is_given(const std::shared_ptr<Want>& want);
  bool is_wanted();  // others wait for chunks

  explicit Staging();
  ~Staging();

 private:
  void give_back(const std::vector<size_t>& chunks);

  uint8_t* base_;
  std::mutex mutex_;
  std::vector<size_t> free_;
  std::deque<std::weak_ptr<Want>> wants_;  // those that gave up waiting have expired
};

class Region;

// Where pieces of media lie in the chunks of a lease: at addresses that agree with their offsets where the
// medium asks for it, and neighbours together, so that one move serves many small slices.
class Layout {
 public:
  struct Piece {  // of a slice, in order
    size_t slice;
    uint64_t offset;  // within the slice
    uint64_t length;
    size_t chunk;
    uint64_t at;  // within the chunk
  };
  struct Move {  // one call of the medium
    std::shared_ptr<Region> region;
    uint64_t offset;  // within the region
    uint64_t length;
    size_t chunk;
    uint64_t at;
    size_t slice;  // the first
  };
  std::vector<Piece> pieces;
  std::vector<Move> moves;

  void clear() { pieces.clear(), moves.clear(), num_chunks_ = 0, at_ = 0; }
  size_t num_chunks() const { return num_chunks_; }
  // Places `length` bytes from `offset` of the region, which are those from `begin` of the slice, in at
  // most `max_chunks`; returns how many of them found room.
  uint64_t add(const std::shared_ptr<Region>& region, uint64_t offset, uint64_t length, size_t slice, uint64_t begin,
               size_t max_chunks);

 private:
  size_t num_chunks_ = 0;
  uint64_t at_ = 0;  // end of what was placed in the last chunk
};

}  // namespace mooncake
