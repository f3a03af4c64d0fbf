// SPDX-License-Identifier: Apache-2.0
#include "transport.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <thread>

#include "crc32c.h"
#include "pieces.h"

namespace mooncake {

namespace {
constexpr auto kWorkerIdle = std::chrono::seconds(10);

// In a forked child.
[[gnu::cold]] Completion refused() {
  Completion completion;
  completion.status = Status::kCancelled;
  completion.reason = "the peer was opened before this process was forked; make an engine in this process";
  return completion;
}

// By address; ranges may overlap, so the nearest start need not be the region, but nearly always is.
const RemoteRegion* region_of(const std::vector<RemoteRegion>& regions, uint64_t address, uint64_t length,
                              bool needs_write) {
  auto after = std::upper_bound(regions.begin(), regions.end(), address,
                                [](uint64_t at, const RemoteRegion& region) { return at < region.address; });
  while (after != regions.begin())
    if ((--after)->contains(address, length) && (after->is_writable || !needs_write)) return &*after;
  return nullptr;
}
}  // namespace

void Checksums::add(size_t slice, uint64_t offset, uint64_t length, uint32_t crc) {
  pieces_.push_back({slice, offset, length, crc});
}

std::vector<uint32_t> Checksums::per_slice(size_t num_slices) {
  std::vector<uint32_t> sums(num_slices, 0);
  auto earlier = [](const Piece& a, const Piece& b) {
    return std::tie(a.slice, a.offset) < std::tie(b.slice, b.offset);
  };
  if (!std::is_sorted(pieces_.begin(), pieces_.end(), earlier)) std::sort(pieces_.begin(), pieces_.end(), earlier);
  for (const Piece& piece : pieces_)
    sums[piece.slice] = piece.offset ? crc32c_combine(sums[piece.slice], piece.crc, piece.length) : piece.crc;
  return sums;
}

Peer::Peer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, int max_workers)
    : local_(std::move(local)), max_workers_(max_workers) {
  set_remote(std::move(remote));
}

Peer::~Peer() = default;

void Peer::set_remote(std::vector<RemoteRegion> remote) {
  std::sort(remote.begin(), remote.end(), [](auto& a, auto& b) { return a.address < b.address; });
  std::lock_guard lock(mutex_);
  remote_ = std::make_shared<const std::vector<RemoteRegion>>(std::move(remote));
}

std::optional<RemoteRegion> Peer::remote_of(uint64_t address, uint64_t length) {
  std::lock_guard lock(mutex_);
  const RemoteRegion* found = region_of(*remote_, address, length, false);
  return found ? std::optional(*found) : std::nullopt;
}

// Resolves every slice to a local region and a remote key, before anything moves.
bool Peer::prepare(Job& job, Completion& completion) {
  std::shared_ptr<const std::vector<RemoteRegion>> remote;
  {
    std::lock_guard lock(mutex_);
    remote = remote_;
  }
  const auto& slices = job.request.slices;
  const bool is_write = job.request.op == Op::kWrite;
  job.keys.resize(slices.size());
  const Region* here = nullptr;
  const RemoteRegion* there = nullptr;
  for (size_t i = 0; i < slices.size(); i++) {
    const Slice& slice = slices[i];
    if (slice.length == 0) continue;
    if (!here || !here->contains(slice.local, slice.length)) {
      RegionRef found = local_->use(slice.local, slice.length, !is_write);
      if (!found) return completion = job.failed(Status::kUnregistered, static_cast<int64_t>(i)), false;
      here = found.get();
      if (std::find(job.regions.begin(), job.regions.end(), found) == job.regions.end()) {
        job.uses_brief |= found->is_brief;
        job.regions.push_back(std::move(found));
      } else {
        found->end_use();
      }
    }
    if (!there || !there->contains(slice.remote, slice.length)) {
      there = region_of(*remote, slice.remote, slice.length, is_write);
      if (!there) return completion = job.failed(Status::kAccessDenied, static_cast<int64_t>(i)), false;
    }
    job.keys[i] = there->key;
    completion.num_bytes += slice.length;
  }
  return true;
}

Completion Peer::run(Request request) {
  if (!own_process_) return refused();
  Job job(std::move(request));
  Completion completion;
  if (!prepare(job, completion) || completion.num_bytes == 0) {
    if (completion.status == Status::kOk && job.request.checksum)
      completion.checksums.resize(job.request.slices.size());
    return completion;
  }
  return carry(job);
}

// With the mutex held. A region closed before is found here, one closed later by region_closed().
void Peer::enlist(Job& job) {
  job.sequence = next_sequence_++;
  active_.push_back(&job);
  for (const RegionRef& region : job.regions)
    if (region->is_closed()) job.stop = Status::kCancelled;
}

Completion Peer::carry(Job& job) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return job.failed(Status::kCancelled);
    enlist(job);
  }
  Completion completion = perform(job);
  {
    std::lock_guard lock(mutex_);
    active_.erase(std::find(active_.begin(), active_.end(), &job));
    changed_.notify_all();
  }
  return completion;
}

Completion Peer::perform(Job& job) {
  auto is_foreign = [&](const RegionRef& region) { return region->medium && !takes(*region->medium, job.request); };
  bool needs_staging = std::any_of(job.regions.begin(), job.regions.end(), is_foreign);
  return needs_staging ? through_staging(job) : execute(job);
}

// A part of a job as a job of its own, so that whatever stops the one stops the other.
Completion Peer::execute_part(Job& whole, Job& part) {
  {
    std::lock_guard lock(mutex_);
    if (whole.stop.load() != Status::kOk) return part.failed(whole.stop.load());
    enlist(part);
  }
  Completion completion = execute(part);
  std::lock_guard lock(mutex_);
  active_.erase(std::find(active_.begin(), active_.end(), &part));
  changed_.notify_all();
  return completion;
}

Status Peer::submit(QueueRef queue, uint64_t token, Request request, int64_t& failed_slice) {
  auto job = std::make_unique<Job>(std::move(request));
  Completion completion;
  auto end = [&] {
    job.reset();  // the caller has its memory back
    completion.token = token;
    queue->push(std::move(completion));
    return Status::kOk;
  };
  if (!own_process_) {
    completion = refused();
    return end();
  }
  bool is_ready = prepare(*job, completion);
  if (completion.status == Status::kUnregistered) {
    failed_slice = completion.failed_slice;
    return Status::kUnregistered;
  }
  if (!is_ready || completion.num_bytes == 0) {
    if (is_ready && job->request.checksum) completion.checksums.resize(job->request.slices.size());
    return end();
  }
  std::lock_guard lock(mutex_);
  if (closed_) {
    completion = job->failed(Status::kCancelled);
    return end();
  }
  line_up({std::move(queue), token, std::make_unique<Pieces>(std::move(job))}, false);
  if (static_cast<size_t>(num_idle_) >= queued_.size()) {
    offered_.notify_one();
    return Status::kOk;
  }
  bool has_new_worker = num_workers_ < max_workers_ && add_worker();
  if (num_workers_ == 0) {
    fail_queued(Status::kIoError, EAGAIN);
    return Status::kOk;
  }
  offered_.notify_one();
  if (!has_new_worker || queued_.size() > 1) watch_deadlines();
  return Status::kOk;
}

// With the mutex held. False: the system gives no thread. A worker counts only once it is there, because closing
// waits for those that count.
bool Peer::add_worker() {
  try {
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  } catch (const std::exception&) {  // std::system_error, or std::bad_alloc of the thread's state
    return false;
  }
  num_workers_++;
  return true;
}

void Peer::Queued::report() {
  Completion completion = pieces->completion();
  completion.token = token;
  completion.is_partial = !pieces->is_over();
  if (!completion.is_partial) pieces.reset();  // its caller, who learns of the end here, has its memory back
  queue->push(std::move(completion));
}

// With the mutex held: behind its equals, or before them when it has begun already.
void Peer::line_up(Queued item, bool again) {
  int priority = item.pieces->request().priority;
  earliest_deadline_ = std::min(earliest_deadline_, item.pieces->request().deadline);
  auto place = std::find_if(queued_.begin(), queued_.end(), [&](const Queued& other) {
    int its = other.pieces->request().priority;
    return again ? its <= priority : its < priority;
  });
  queued_.insert(place, std::move(item));
}

// With the mutex held. False: something more urgent has come, the rest must wait. The mutex is dropped
// only while a piece is enlisted, so cancel() misses none.
bool Peer::carry_pieces(std::unique_lock<std::mutex>& lock, Queued& item) {
  const Request& request = item.pieces->request();
  while (true) {
    Job& piece = item.pieces->next();
    enlist(piece);
    lock.unlock();
    Completion completion = piece.is_late() ? piece.failed(Status::kTimedOut) : perform(piece);
    lock.lock();
    active_.erase(std::find(active_.begin(), active_.end(), &piece));
    changed_.notify_all();
    Status stopped = piece.stop.load();
    item.pieces->finish(std::move(completion));
    if (item.pieces->is_over()) return true;
    if (stopped != Status::kOk) {  // too late for this piece, in time for the next
      item.pieces->finish(piece.failed(stopped));
      return true;
    }
    if (request.reports) item.report();
    if (!queued_.empty() && queued_.front().pieces->request().priority > request.priority) return false;
  }
}

// A worker thread; leaves when there has been nothing to do for a while, so idle peers cost none.
void Peer::work() {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (queued_.empty()) {
      num_idle_++;
      bool is_awake = offered_.wait_for(lock, kWorkerIdle, [&] { return closed_ || !queued_.empty(); });
      num_idle_--;
      if (!is_awake) break;
      continue;
    }
    Queued next = std::move(queued_.front());
    queued_.pop_front();
    if (queued_.empty()) earliest_deadline_ = Clock::time_point::max();
    if (!carry_pieces(lock, next)) {
      line_up(std::move(next), true);
      watch_deadlines();
      continue;
    }
    lock.unlock();
    next.report();
    lock.lock();
  }
  num_workers_--;
  changed_.notify_all();
}

// With the mutex held: one that leaves the queue without a worker.
void Peer::end_queued(Queued& item, Status status, int error) {
  Completion completion;
  completion.status = status, completion.error = error;
  if (status == Status::kIoError) completion.reason = reason_of(error);
  item.pieces->finish(std::move(completion));
  item.report();
}

void Peer::fail_queued(Status status, int error) {
  for (Queued& item : queued_) end_queued(item, status, error);
  queued_.clear();
  earliest_deadline_ = Clock::time_point::max();
}

// With the mutex held: ends what has waited for too long, and finds the next deadline.
void Peer::end_late() {
  auto now = Clock::now();
  earliest_deadline_ = Clock::time_point::max();
  std::erase_if(queued_, [&](Queued& item) {
    Clock::time_point deadline = item.pieces->request().deadline;
    if (deadline > now) {
      earliest_deadline_ = std::min(earliest_deadline_, deadline);
      return false;
    }
    end_queued(item, Status::kTimedOut);
    return true;
  });
}

// With the mutex held: there may be more in the queue than workers that take it soon. Where the system gives no
// thread for it, what is too late ends when a worker takes it.
void Peer::watch_deadlines() {
  if (has_watcher_) {
    if (earliest_deadline_ < watched_until_) sooner_.notify_one();
    return;
  }
  try {
    std::thread([self = shared_from_this()] { self->watch(); }).detach();
    has_watcher_ = true;
  } catch (const std::exception&) {  // as in add_worker()
  }
}

// The thread that ends late jobs; leaves as workers do.
void Peer::watch() {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    end_late();
    bool is_idle = queued_.empty();
    watched_until_ = is_idle ? Clock::now() + kWorkerIdle : earliest_deadline_;
    bool is_awake =
        sooner_.wait_until(lock, watched_until_, [&] { return closed_ || earliest_deadline_ < watched_until_; });
    if (is_idle && !is_awake && queued_.empty()) break;
  }
  has_watcher_ = false;
  changed_.notify_all();
}

void Peer::stop(Job& job, Status status) {
  Status running = Status::kOk;
  job.stop.compare_exchange_strong(running, status);
  for (int socket : job.sockets) shutdown(socket, SHUT_RDWR);
}

void Peer::stop_all(Status status) {
  for (Job* job : active_) stop(*job, status);
  wake();
}

void Peer::cancel() {
  if (!own_process_) return;
  std::unique_lock lock(mutex_);
  fail_queued(Status::kCancelled);
  stop_all(Status::kCancelled);
  uint64_t later = next_sequence_;
  changed_.wait(lock, [&] {
    return std::none_of(active_.begin(), active_.end(), [&](Job* job) { return job->sequence < later; });
  });
}

void Peer::close() {
  if (!own_process_) return;  // a forked child: the workers are not here
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    offered_.notify_all();
    sooner_.notify_all();
  }
  cancel();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_workers_ == 0 && !has_watcher_ && active_.empty(); });
  release();
}

void Peer::region_closed(const Region& region) {
  if (!own_process_) return;  // the jobs that this child knows are its parent's
  std::lock_guard lock(mutex_);
  for (Job* job : active_) {
    auto uses = [&](const RegionRef& used) { return used.get() == &region; };
    if (std::any_of(job->regions.begin(), job->regions.end(), uses)) stop(*job, Status::kCancelled);
  }
  wake();
}

bool Peer::attach(Job& job, int socket) {
  std::lock_guard lock(mutex_);
  job.sockets.push_back(socket);
  return job.stop.load() == Status::kOk;
}

void Peer::detach(Job& job, int socket) {
  std::lock_guard lock(mutex_);
  std::erase(job.sockets, socket);
}

}  // namespace mooncake
