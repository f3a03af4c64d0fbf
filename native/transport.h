// SPDX-License-Identifier: Apache-2.0
// What a transport must do, and everything it need not do itself.
//
// A Peer is one remote process as one transport sees it. The base class checks slices against
// registered ranges on both sides, keeps the list of jobs under way, runs submitted jobs on worker
// threads and stops jobs that are cancelled or whose local memory goes away. A transport implements
// execute(): move the slices of one job, in the calling thread, until done, stopped or too late, and
// touch local memory only inside a Touch. When execute() has returned, the job's memory is untouched.
// Local bytes in a medium come to execute() through staging memory, unless it says that it takes them as
// they are.
//
//     run     ──────────────▶ execute() in the caller's thread: no hand-over, lowest latency
//     submit  ──▶ worker ───▶ execute() ──▶ Queue     in pieces, the most urgent job first
//
// While all workers are busy, perhaps with a peer that hangs, one more thread ends what waits for them in time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "own_process.h"
#include "queue.h"
#include "region.h"
#include "slice.h"

namespace mooncake {

struct RemoteRegion {
  uint64_t address;
  uint64_t size;
  uint64_t key;
  bool is_writable = true;
  bool contains(uint64_t at, uint64_t length) const {
    return at >= address && length <= size && at - address <= size - length;
  }
};

struct Request {
  Op op;
  std::vector<Slice> slices;
  bool checksum;
  Clock::time_point deadline;
  int priority = 0;      // of submitted requests: a greater one goes first
  bool reports = false;  // report progress to the queue
};

// A request under way.
struct Job {
  Request request;
  std::vector<RegionRef> regions{};       // the local memory it works on, each once
  bool uses_brief = false;                // some are brief, and counted; false for a part of a job
  std::vector<uint64_t> keys{};           // of the remote region, per slice
  std::atomic<Status> stop{Status::kOk};  // anything else: give up with this status
  uint64_t sequence = 0;                  // order of arrival, for cancel()
  std::vector<int> sockets{};             // to shut down when stopped; guarded by the peer's mutex

  explicit Job(Request request) : request(std::move(request)) {}
  ~Job() {
    if (uses_brief)
      for (const RegionRef& region : regions) region->end_use();
  }
  Completion failed(Status status, int64_t slice = -1, int error = 0) const {
    Completion completion;
    completion.status = status, completion.failed_slice = slice, completion.error = error;
    if (status == Status::kIoError) completion.reason = reason_of(error);
    return completion;
  }
  bool is_late() const { return Clock::now() >= request.deadline; }
};

class Pieces;

class Peer : public RegionListener, public std::enable_shared_from_this<Peer> {
 public:
  Peer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, int max_workers);
  ~Peer() override;

  Completion run(Request request);
  // The completion carries `token` to `queue`. kUnregistered: refused on the spot, nothing will come.
  Status submit(QueueRef queue, uint64_t token, Request request, int64_t& failed_slice);
  void set_remote(std::vector<RemoteRegion> remote);
  // Fails everything queued or under way; when it returns no local memory is touched on its behalf. In a forked child
  // it does nothing, and nothing can be moved there: the connections are the parent's.
  void cancel();
  void close();  // cancel, and refuse whatever comes later
  virtual bool is_lost() const { return false; }

  void region_closed(const Region& region) final;

 protected:
  virtual Completion execute(Job& job) = 0;
  // execute() may be given local bytes of this medium for such a request.
  virtual bool takes(const Medium& /*medium*/, const Request& /*request*/) const { return false; }
  virtual void wake() {}     // called with the mutex held after a job's stop was set
  virtual void release() {}  // called with the mutex held when the last job of a closed peer has ended

  // For execute(): a socket that must be shut down when the job is stopped; false when it already is.
  bool attach(Job& job, int socket);
  void detach(Job& job, int socket);

  std::shared_ptr<RegionTable> local_;
  std::mutex mutex_;
  std::condition_variable changed_;
  void stop_all(Status status);  // with the mutex held
  bool own_process() const { return static_cast<bool>(own_process_); }
  std::optional<RemoteRegion> remote_of(uint64_t address, uint64_t length);

 private:
  struct Queued {
    QueueRef queue;
    uint64_t token;
    std::unique_ptr<Pieces> pieces;
    void report();  // its end, or its progress
  };

  bool prepare(Job& job, Completion& completion);
  void stop(Job& job, Status status);
  Completion carry(Job& job);
  Completion perform(Job& job);
  Completion through_staging(Job& job);
  Completion execute_part(Job& whole, Job& part);
  void enlist(Job& job);
  void work();
  void line_up(Queued item, bool again);
  bool carry_pieces(std::unique_lock<std::mutex>& lock, Queued& item);
  bool add_worker();
  void end_queued(Queued& item, Status status, int error = 0);
  void fail_queued(Status status, int error = 0);
  void end_late();
  void watch_deadlines();
  void watch();

  std::shared_ptr<const std::vector<RemoteRegion>> remote_;
  const int max_workers_;
  int num_workers_ = 0;
  int num_idle_ = 0;
  bool closed_ = false;
  uint64_t next_sequence_ = 0;
  std::vector<Job*> active_;
  std::deque<Queued> queued_;  // most urgent first, then oldest
  std::condition_variable offered_;
  // Of those in the queue, or of one that has left it since.
  Clock::time_point earliest_deadline_ = Clock::time_point::max();
  bool has_watcher_ = false;
  Clock::time_point watched_until_{};  // when the watcher looks next
  std::condition_variable sooner_;
  OwnProcess own_process_;
};

// CRC32C per slice when pieces of slices are finished in any order.
class Checksums {
 public:
  void add(size_t slice, uint64_t offset, uint64_t length, uint32_t crc);
  std::vector<uint32_t> per_slice(size_t num_slices);

 private:
  struct Piece {
    size_t slice;
    uint64_t offset, length;
    uint32_t crc;
  };
  std::vector<Piece> pieces_;
};

}  // namespace mooncake
