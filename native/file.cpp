// SPDX-License-Identifier: Apache-2.0
#include "file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "crc32c.h"

namespace mooncake {

namespace {

uint64_t up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

[[noreturn]] void fail(int error, const std::string& step) {
  throw std::system_error(error, std::generic_category(), step);
}

// Missing space is an error now and not in the middle of a transfer, where the file system can reserve it.
void extend(int fd, uint64_t from, uint64_t size) {
  if (fallocate(fd, 0, static_cast<off_t>(from), static_cast<off_t>(size - from)) == 0) return;
  if (errno == EOPNOTSUPP && ftruncate(fd, static_cast<off_t>(size)) == 0) return;
  int error = errno;
  (void)!ftruncate(fd, static_cast<off_t>(from));
  fail(error, "extend");
}

uint64_t memory_alignment_of(int fd, uint64_t& unit) {
#ifdef STATX_DIOALIGN
  struct statx status{};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && status.stx_mask & STATX_DIOALIGN &&
      status.stx_dio_mem_align > 0) {
    unit = std::max<uint64_t>(unit, status.stx_dio_offset_align);
    return status.stx_dio_mem_align;
  }
#endif
  return FileMedium::kPage;  // unknown to the kernel: a page always works
}

// pread or pwrite of one part to its end.
Outcome finish(FileIo io) {
  Outcome outcome;
  int result;
  do {
    ssize_t count = io.op == Op::kWrite ? pwrite(io.fd, io.memory, io.length, static_cast<off_t>(io.offset))
                                        : pread(io.fd, io.memory, io.length, static_cast<off_t>(io.offset));
    result = count < 0 ? -errno : static_cast<int>(count);
  } while (FileMedium::goes_on(io, result, outcome));
  return outcome;
}

}  // namespace

FileMedium::FileMedium(const std::string& path, uint64_t size, Options options) : options_(options) {
  // The owner of a link at that path would choose which file is overwritten.
  int flags = (options.is_writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW;
  fd_ = ::open(path.c_str(), flags | (options.is_writable && size ? O_CREAT : 0), 0600);
  if (fd_ < 0) fail(errno, "open");
  try {
    struct stat status{};
    if (fstat(fd_, &status) != 0) fail(errno, "stat");
    bool is_device = S_ISBLK(status.st_mode);
    if (!is_device && !S_ISREG(status.st_mode)) fail(EINVAL, "open: neither a file nor a block device");
    auto there = static_cast<uint64_t>(status.st_size);
    if (is_device && ioctl(fd_, BLKGETSIZE64, &there) != 0) fail(errno, "size of the device");
    if (size > there && (is_device || !options.is_writable)) fail(ENOSPC, "extend");
    if (size > there) extend(fd_, there, size);
    size_ = size ? size : there;
    if (size_ == 0) fail(ENODATA, "open: the file is empty");
    reserve();
  } catch (...) {
    ::close(fd_);
    throw;
  }
  // The file that is open, whatever has its name by now.
  open_ways("/proc/self/fd/" + std::to_string(fd_));
}

FileMedium::FileMedium(int descriptor, uint64_t size, Options options)
    : options_(options), fd_(descriptor), size_(size) {
  struct stat status{};
  int error = 0;
  if (fstat(fd_, &status) != 0) error = errno;
  else if (S_ISREG(status.st_mode) && static_cast<uint64_t>(status.st_size) < size) error = ENODATA;
  else if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) error = EINVAL;
  if (error) {
    ::close(fd_);
    fail(error, "open a peer's file");
  }
  open_ways("/proc/self/fd/" + std::to_string(fd_));
}

// The way around the page cache, and the ring.
void FileMedium::open_ways(const std::string& path) {
  int flags = (options_.is_writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  std::string direct = "page cache as asked";
  if (options_.direct) {
    direct_fd_ = ::open(path.c_str(), flags | O_DIRECT);
    direct = direct_fd_ >= 0 ? "O_DIRECT" : std::string("page cache because O_DIRECT: ") + std::strerror(errno);
    if (direct_fd_ >= 0) memory_alignment_ = memory_alignment_of(direct_fd_, unit_);
  }
  int error = 0;
  has_ring_ = options_.ring && Ring::open(1, false, error);
  std::string queue = has_ring_ ? "io_uring" : "threads";
  if (!has_ring_) queue += options_.ring ? std::string(" because io_uring: ") + std::strerror(error) : " as asked";
  how_ = queue + ", " + direct;
}

// Addresses that are no memory of this process, so that they identify this file only.
void FileMedium::reserve() {
  void* addresses = mmap(nullptr, up(size_, kPage), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) fail(errno, "reserve addresses");
  address_ = reinterpret_cast<uint64_t>(addresses);
}

FileIo FileMedium::cut(Op op, uint64_t offset, uint8_t* memory, uint64_t length, bool& needs_staging) const {
  needs_staging = false;
  if (direct_fd_ < 0) return {op, fd_, memory, std::min(length, kIoBytes), offset};
  uint64_t head = up(offset, unit_) - offset;
  if (head > 0) return {op, fd_, memory, std::min(length, head), offset};
  if (length < unit_) return {op, fd_, memory, length, offset};
  needs_staging = reinterpret_cast<uint64_t>(memory) % memory_alignment_ != 0;
  return {op, direct_fd_, memory, std::min(length / unit_ * unit_, kIoBytes), offset, true};
}

bool FileMedium::goes_on(FileIo& io, int result, Outcome& outcome) {
  if (result == -EINTR || result == -EAGAIN) return true;
  if (result <= 0) {  // nothing, without an error: the file has become shorter, or the disk is full
    int error = result < 0 ? -result : io.op == Op::kRead ? ENODATA : ENOSPC;
    return outcome = {Status::kIoError, error}, false;
  }
  auto count = static_cast<uint64_t>(result);
  io.memory += count, io.offset += count, io.length -= count;
  // A direct read that stops within a unit has met the end of the file, and what follows it cannot be read directly.
  // Through the page cache the kernel says at the next read whether it is the end or a place that cannot be read.
  if (io.length > 0 && io.op == Op::kRead && io.is_direct && count % 512 != 0)
    return outcome = {Status::kIoError, ENODATA}, false;
  return io.length > 0;
}

Outcome FileMedium::move(Op op, uint64_t offset, uint8_t* memory, uint64_t length) {
  static constexpr uint64_t kBounce = 256 << 10;
  std::unique_ptr<uint8_t, decltype(&std::free)> bounce(nullptr, &std::free);
  while (length > 0) {
    bool needs_staging;
    FileIo io = cut(op, offset, memory, length, needs_staging);
    if (needs_staging) {
      if (!bounce) bounce.reset(static_cast<uint8_t*>(std::aligned_alloc(kPage, kBounce)));
      if (!bounce) return {Status::kIoError, ENOMEM};
      io.memory = bounce.get(), io.length = std::min(io.length, std::max(kBounce, unit_));
      if (op == Op::kWrite) std::memcpy(bounce.get(), memory, io.length);
    }
    Outcome outcome = finish(io);
    if (outcome.status != Status::kOk) return outcome;
    if (needs_staging && op == Op::kRead) std::memcpy(memory, bounce.get(), io.length);
    offset += io.length, memory += io.length, length -= io.length;
  }
  return {};
}

Outcome FileMedium::read(uint64_t offset, void* into, uint64_t length) {
  return move(Op::kRead, offset, static_cast<uint8_t*>(into), length);
}

Outcome FileMedium::write(uint64_t offset, const void* from, uint64_t length) {
  return move(Op::kWrite, offset, const_cast<uint8_t*>(static_cast<const uint8_t*>(from)), length);
}

Outcome FileMedium::flush() {
  while (fdatasync(fd_) != 0)
    if (errno != EINTR) return {Status::kIoError, errno};
  return {};
}

Outcome FileMedium::provide(uint64_t offset, uint64_t length) {
  while (fallocate(fd_, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(length)) != 0) {
    if (errno == EOPNOTSUPP || errno == ENODEV) return {};  // a device has all its room
    if (errno != EINTR) return {Status::kIoError, errno};
  }
  return {};
}

// The ring that serves event loops: any thread submits its parts, one thread takes completions out. Owns
// itself while that thread runs, so that the medium may end in it.
class FileMedium::Engine : public std::enable_shared_from_this<Engine> {
 public:
  static std::shared_ptr<Engine> open(int depth) {
    int error;
    auto ring = Ring::open(static_cast<unsigned>(depth) + 1, false, error);
    if (!ring) return nullptr;
    auto engine = std::make_shared<Engine>();
    engine->ring_ = std::move(ring), engine->room_ = static_cast<size_t>(depth);
    try {
      std::thread([engine] { engine->work(); }).detach();
    } catch (const std::exception&) {  // the medium's own threads serve instead, if there are any
      return nullptr;
    }
    return engine;
  }

  // A range as its parts, with one answer when the last is done.
  struct Range {
    std::mutex mutex;
    size_t num_left = 0;
    Outcome outcome;
    Done done;
    void ended(const Outcome& part) {
      std::unique_lock lock(mutex);
      if (part.status != Status::kOk && outcome.status == Status::kOk) outcome = part;
      if (--num_left > 0) return;
      lock.unlock();
      done(outcome);
    }
  };

  void add(const FileIo& io, std::shared_ptr<Range> range) {
    std::lock_guard lock(mutex_);
    uint64_t token = ++last_token_;
    parts_.emplace(token, Part{io, std::move(range)});
    waiting_.push_back(token);
    push();
  }

  void close() {
    if (!own_process_) return;  // a forked child: the thread is not here, and the ring is not its own
    std::lock_guard lock(mutex_);
    ring_->push_nothing(0);  // there is one place more than parts under way
    (void)ring_->submit(0);
  }

 private:
  struct Part {
    FileIo io;
    std::shared_ptr<Range> range;
  };

  // With the mutex held.
  void push() {
    bool has_any = false;
    while (room_ > 0 && !waiting_.empty() && ring_->push(parts_.at(waiting_.front()).io, waiting_.front()))
      waiting_.pop_front(), room_--, has_any = true;
    if (has_any) (void)ring_->submit(0);
  }

  void work() {
    uint64_t token;
    int result;
    while (true) {
      if (ring_->wait() != 0) return;
      while (ring_->pop(token, result)) {
        if (token == 0) return;
        if (Part part; take(token, result, part)) part.range->ended(outcome_);
      }
    }
  }

  // True: the part is over, with `outcome_`.
  bool take(uint64_t token, int result, Part& over) {
    std::lock_guard lock(mutex_);
    room_++;
    auto found = parts_.find(token);
    outcome_ = {};
    bool goes_on = FileMedium::goes_on(found->second.io, result, outcome_);
    if (goes_on) waiting_.push_front(token);
    else over = std::move(found->second), parts_.erase(found);
    push();
    return !goes_on;
  }

  std::mutex mutex_;
  std::unique_ptr<Ring> ring_;
  size_t room_ = 0;
  uint64_t last_token_ = 0;
  std::unordered_map<uint64_t, Part> parts_;
  std::deque<uint64_t> waiting_;
  Outcome outcome_;  // of the thread
  OwnProcess own_process_;
};

FileMedium::~FileMedium() {
  if (engine_) engine_->close();
  if (address_) munmap(reinterpret_cast<void*>(address_), up(size_, kPage));
  if (direct_fd_ >= 0) ::close(direct_fd_);
  ::close(fd_);
}

std::shared_ptr<FileMedium::Engine> FileMedium::engine() {
  std::lock_guard lock(engine_mutex_);
  if (!engine_ && has_ring_) engine_ = Engine::open(options_.depth);
  return engine_;
}

void FileMedium::start(Op op, uint64_t offset, void* memory, uint64_t length, Done done) {
  std::shared_ptr<Engine> serving = engine();
  std::vector<FileIo> parts;
  bool needs_staging = false;
  auto* at = static_cast<uint8_t*>(memory);
  for (uint64_t placed = 0; placed < length && serving && !needs_staging;) {
    parts.push_back(cut(op, offset + placed, at + placed, length - placed, needs_staging));
    placed += parts.back().length;
  }
  if (!serving || needs_staging || length == 0) return Medium::start(op, offset, memory, length, std::move(done));
  auto range = std::make_shared<Engine::Range>();
  range->num_left = parts.size(), range->done = std::move(done);
  for (const FileIo& io : parts) serving->add(io, range);
}

namespace {

// A ring per thread that moves: no other thread uses it, so nothing is locked and none is interrupted.
Ring* own_ring(int depth) {
  struct Owned {
    std::unique_ptr<Ring> ring;
    int depth = 0;
    OwnProcess own_process;
  };
  static thread_local std::unique_ptr<Owned> owned;
  if (owned && !owned->own_process) (void)owned->ring.release();  // the parent's
  if (!owned || !owned->ring || owned->depth < depth) {
    int error;
    owned = std::make_unique<Owned>();
    owned->ring = Ring::open(static_cast<unsigned>(depth), true, error), owned->depth = depth;
  }
  return owned->ring.get();
}

// Parts under way by a ring of the calling thread, or by threads of the medium.
class Lot {
 public:
  struct Ended {
    uint64_t token;
    int result;                        // of the kernel; the part may have a rest
    std::optional<Outcome> outcome{};  // of the medium's threads, which carry parts to their end
  };

  explicit Lot(Ring* ring) : ring_(ring) {}
  ~Lot() {
    while (num_under_way_ > 0) (void)next();
  }
  size_t size() const { return num_under_way_; }

  void add(FileMedium& medium, const FileIo& io, uint64_t token) {
    num_under_way_++;
    if (ring_) {
      while (!ring_->push(io, token)) (void)ring_->submit(0);
      return;
    }
    auto answer = [this, token](Outcome outcome) {
      std::lock_guard lock(mutex_);
      ended_.push_back({token, 0, outcome});
      changed_.notify_one();
    };
    medium.start(io.op, io.offset, io.memory, io.length, std::move(answer));
  }

  // The next part that ended, perhaps to be added again for its rest; waits for it.
  Ended next() {
    Ended ended{0, -EIO};
    if (ring_) {
      while (!ring_->pop(ended.token, ended.result)) (void)ring_->submit(1);
    } else {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !ended_.empty(); });
      ended = ended_.front();
      ended_.pop_front();
    }
    num_under_way_--;
    return ended;
  }

 private:
  Ring* ring_;
  size_t num_under_way_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ended> ended_;
};

// One job over the file path: parts of its slices, so many at a time.
class FileJob {
 public:
  // `files`: the region of each slice, null for empty ones.
  FileJob(Job& job, std::vector<RegionRef> files) : job_(job), files_(std::move(files)) {
    for (const RegionRef& region : job_.regions) touch(region);
    for (const RegionRef& region : files_)
      if (region) touch(region);
  }

  Completion carry() {
    auto found = std::find_if(files_.begin(), files_.end(), [](auto& file) { return file; });
    if (found == files_.end()) {  // nothing but empty slices
      Completion completion;
      if (job_.request.checksum) completion.checksums.resize(files_.size());
      return completion;
    }
    FileMedium& first = *medium(static_cast<size_t>(found - files_.begin()));
    Lot lot(first.has_ring() ? own_ring(first.depth()) : nullptr);
    parts_.resize(static_cast<size_t>(first.depth()));
    for (size_t i = 0; i < parts_.size(); i++) idle_.push_back(i);
    Touch touch(touched_);
    if (!touch) return job_.failed(closed_status());
    while (true) {
      look();
      while (status_ == Status::kOk && !idle_.empty() && begin(lot)) continue;
      if (lot.size() == 0) break;
      end(lot, lot.next());
    }
    if (status_ != Status::kOk) return job_.failed(status_, failed_slice_, error_);
    Completion completion;
    for (const Slice& slice : job_.request.slices) completion.num_bytes += slice.length;
    if (job_.request.checksum) completion.checksums = sums_.per_slice(job_.request.slices.size());
    return completion;
  }

 private:
  static constexpr uint64_t kBounce = 256 << 10;
  struct Part {
    FileIo io{};  // what is left of it
    size_t slice = 0;
    uint64_t begin = 0, length = 0;  // within the slice
    bool is_bounced = false;
    std::unique_ptr<uint8_t, decltype(&std::free)> bounce{nullptr, &std::free};
  };

  void touch(const RegionRef& region) {
    if (std::find(touched_.begin(), touched_.end(), region) == touched_.end()) touched_.push_back(region);
  }
  FileMedium* medium(size_t slice) const { return static_cast<FileMedium*>(files_[slice]->medium.get()); }
  Status closed_status() const {
    auto is_closed = [](auto& region) { return region->is_closed(); };
    bool is_ours = std::any_of(job_.regions.begin(), job_.regions.end(), is_closed);
    return is_ours ? Status::kCancelled : Status::kAccessDenied;
  }
  void fail(Status status, int64_t slice = -1, int error = 0) {
    if (status_ == Status::kOk) status_ = status, failed_slice_ = slice, error_ = error;
  }

  // Is there a reason to begin no more? What is under way must end either way: it is in the device's hands.
  void look() {
    if (Status stop = job_.stop.load(); stop != Status::kOk) return fail(stop);
    if (slice_ < files_.size() && job_.is_late()) return fail(Status::kTimedOut, static_cast<int64_t>(slice_));
    for (const RegionRef& region : touched_)
      if (region->is_closed()) return fail(closed_status());
  }

  // One more part; false when there is none.
  bool begin(Lot& lot) {
    const auto& slices = job_.request.slices;
    while (slice_ < slices.size() && done_ == slices[slice_].length) slice_++, done_ = 0;
    if (slice_ == slices.size()) return false;
    const Slice& slice = slices[slice_];
    size_t token = idle_.back();
    Part& part = parts_[token];
    auto* memory = reinterpret_cast<uint8_t*>(slice.local + done_);
    uint64_t offset = slice.remote - files_[slice_]->address + done_;
    part.io = medium(slice_)->cut(job_.request.op, offset, memory, slice.length - done_, part.is_bounced);
    if (part.is_bounced && !bounce(part, memory))
      return fail(Status::kIoError, static_cast<int64_t>(slice_), ENOMEM), false;
    part.slice = slice_, part.begin = done_, part.length = part.io.length;
    done_ += part.length;
    idle_.pop_back();
    lot.add(*medium(part.slice), part.io, token);
    return true;
  }

  // The caller's memory is not aligned as direct I/O wants it.
  bool bounce(Part& part, const uint8_t* memory) {
    if (!part.bounce) part.bounce.reset(static_cast<uint8_t*>(std::aligned_alloc(FileMedium::kPage, kBounce)));
    if (!part.bounce) return false;
    part.io.memory = part.bounce.get(), part.io.length = std::min(part.io.length, kBounce);
    if (part.io.op == Op::kWrite) std::memcpy(part.bounce.get(), memory, part.io.length);
    return true;
  }

  void end(Lot& lot, const Lot::Ended& ended) {
    Part& part = parts_[ended.token];
    Outcome outcome = ended.outcome.value_or(Outcome{});
    if (!ended.outcome && FileMedium::goes_on(part.io, ended.result, outcome))
      return lot.add(*medium(part.slice), part.io, ended.token);
    idle_.push_back(ended.token);
    if (outcome.status != Status::kOk) return fail(outcome.status, static_cast<int64_t>(part.slice), outcome.error);
    auto* memory = reinterpret_cast<uint8_t*>(job_.request.slices[part.slice].local + part.begin);
    if (part.is_bounced && part.io.op == Op::kRead) std::memcpy(memory, part.bounce.get(), part.length);
    if (job_.request.checksum) sums_.add(part.slice, part.begin, part.length, crc32c(memory, part.length));
  }

  Job& job_;
  const std::vector<RegionRef> files_;
  std::vector<RegionRef> touched_;
  std::vector<Part> parts_;
  std::vector<size_t> idle_;
  size_t slice_ = 0;  // the next part begins here
  uint64_t done_ = 0;
  Checksums sums_;
  Status status_ = Status::kOk;
  int64_t failed_slice_ = -1;
  int error_ = 0;
};

}  // namespace

Completion carry_files(Job& job, std::vector<RegionRef> files) { return FileJob(job, std::move(files)).carry(); }

Completion FilePeer::execute(Job& job) {
  const auto& slices = job.request.slices;
  std::vector<RegionRef> files(slices.size());
  RegionRef last;
  for (size_t i = 0; i < slices.size(); i++) {
    const Slice& slice = slices[i];
    if (slice.length == 0) continue;
    if (!last || last->key != job.keys[i]) last = far_->find_key(job.keys[i]);
    bool is_allowed = last && last->contains(slice.remote, slice.length) &&
                      dynamic_cast<FileMedium*>(last->medium.get()) &&
                      (last->is_writable || job.request.op == Op::kRead);
    if (!is_allowed) return job.failed(Status::kAccessDenied, static_cast<int64_t>(i));
    files[i] = last;
  }
  return carry_files(job, std::move(files));
}

}  // namespace mooncake
