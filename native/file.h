// SPDX-License-Identifier: Apache-2.0
// Regions whose bytes lie in a file or on a block device, and the path that moves them to and from memory
// of the same process.
//
// A region's addresses are reserved and never mapped: address - region.address is the offset in the file.
// Whole pages travel by O_DIRECT through io_uring, straight between the device and the caller's memory
// when that is aligned, else through staging; the ends of a range that do not fill a page go through the
// page cache, where the kernel merges them with their neighbours, also when another process writes those.
// Where the kernel refuses io_uring or O_DIRECT, threads and the page cache do it. Another process of this
// host opens such a file by its descriptor (shared_file.h) and moves the bytes itself.
#pragma once

#include <string>

#include "ring.h"
#include "transport.h"

namespace mooncake {

class FileMedium final : public Medium {
 public:
  struct Options {
    bool is_writable = true;
    bool direct = true;
    bool ring = true;  // false: as if the kernel had no io_uring
    int depth = 32;    // reads and writes under way at once, per job and for all peers together
  };
  // `size`: 0 takes the file as it is, else it is created or extended as needed and the region is so long.
  // Throws std::system_error; its text names the step.
  FileMedium(const std::string& path, uint64_t size, Options options);
  // A file of another process of this host by a descriptor that it sent, which is ours from now on. It has
  // no addresses here. Throws as above.
  FileMedium(int descriptor, uint64_t size, Options options);
  ~FileMedium() override;

  uint64_t address() const { return address_; }
  uint64_t size() const { return size_; }
  const std::string& how() const { return how_; }  // "io_uring, O_DIRECT", or what there is instead and why
  int depth() const { return options_.depth; }
  bool has_ring() const { return has_ring_; }
  int descriptor() const { return fd_; }
  const Options& options() const { return options_; }

  Outcome read(uint64_t offset, void* into, uint64_t length) override;
  Outcome write(uint64_t offset, const void* from, uint64_t length) override;
  void start(Op op, uint64_t offset, void* memory, uint64_t length, Done done) override;
  Outcome flush() override;
  Outcome provide(uint64_t offset, uint64_t length) override;
  bool is_shared() const override { return true; }
  uint64_t alignment() const override { return direct_fd_ >= 0 ? kPage : 1; }

  static constexpr uint64_t kPage = 4096;
  static constexpr uint64_t kIoBytes = 512 << 10;  // the largest single read or write

  // The first part of a range that one call can do: which descriptor, and how much of it. Needs staging:
  // the memory is not aligned as direct I/O wants it.
  FileIo cut(Op op, uint64_t offset, uint8_t* memory, uint64_t length, bool& needs_staging) const;
  // What is left of a part after the kernel's answer; false when it is over, well or not.
  static bool goes_on(FileIo& io, int result, Outcome& outcome);

 private:
  class Engine;
  Outcome move(Op op, uint64_t offset, uint8_t* memory, uint64_t length);
  std::shared_ptr<Engine> engine();
  void reserve();
  void open_ways(const std::string& path);

  const Options options_;
  int fd_ = -1;         // through the page cache
  int direct_fd_ = -1;  // or -1: there is no O_DIRECT
  uint64_t size_ = 0;
  uint64_t address_ = 0;
  uint64_t memory_alignment_ = 1;
  uint64_t unit_ = kPage;  // of direct offsets and lengths
  bool has_ring_ = false;
  std::string how_;
  std::mutex engine_mutex_;
  std::shared_ptr<Engine> engine_;
};

// Moves the slices of a job; `files`: the region of each, with a FileMedium, null for empty ones.
Completion carry_files(Job& job, std::vector<RegionRef> files);

// File regions of `far` (of this process, perhaps of this very engine) as a peer.
class FilePeer final : public Peer {
 public:
  FilePeer(std::shared_ptr<RegionTable> local, std::shared_ptr<RegionTable> far, std::vector<RemoteRegion> remote,
           int max_workers)
      : Peer(std::move(local), std::move(remote), max_workers), far_(std::move(far)) {}

 protected:
  Completion execute(Job& job) override;

 private:
  const std::shared_ptr<RegionTable> far_;
};

}  // namespace mooncake
