// SPDX-License-Identifier: Apache-2.0
// Registered memory. Every access, from this process or on behalf of a peer, is checked against a
// Region and made inside a Touch, so that closing a region can guarantee: afterwards nothing touches
// its bytes. A touch lasts one system call or one bounded copy, never a wait for a peer; that is why
// close() is bounded whatever a peer does.
//
//     Touch touch(region);          // counts in; false when the region is closing
//     if (!touch) return denied;
//     readv(fd, into region);       // non-blocking
//                                   // counts out
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "medium.h"

namespace mooncake {

class Region {
 public:
  // Adopts [address, address + size). `fd` is the memfd behind it (then the mapping and the
  // descriptor are ours and freed with the region) or -1 for memory that belongs to someone else.
  Region(uint64_t address, uint64_t size, uint64_t key, int fd, bool is_writable = true, bool is_brief = false);
  // Bytes of a medium; no memory may be touched at these addresses.
  Region(uint64_t address, uint64_t size, uint64_t key, bool is_writable, std::string kind,
         std::shared_ptr<Medium> medium);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const uint64_t address;
  const uint64_t size;
  const uint64_t key;
  const int fd;
  const bool is_writable;                  // false: may be read, by us and by peers, but nothing is moved into it
  const bool is_brief = false;             // registered for one operation of its owner; see RegionTable::remove()
  const std::string kind = "memory";       // or what the medium is: "file", "cuda:0"
  const std::shared_ptr<Medium> medium{};  // null: plain memory

  bool is_shared() const { return fd >= 0 || (medium && medium->is_shared()); }
  bool is_closed() const { return state_.load(std::memory_order_acquire) & kClosing; }
  bool contains(uint64_t at, uint64_t length) const {
    return at >= address && length <= size && at - address <= size - length;
  }
  bool overlaps(const Region& other) const {
    return other.address >= address ? other.address - address < size : address - other.address < other.size;
  }

  // For jobs, which work on it from RegionTable::use() on. Only those of brief regions are counted.
  void end_use() {
    if (is_brief) num_jobs_.fetch_sub(1, std::memory_order_release);
  }

  bool enter();  // false when closing
  void leave();
  void close();  // later touches fail; returns when none is left
  // Releases `what` once the region is closed and nothing touches it. To be called before it is closed.
  void hold_while_open(std::shared_ptr<void> what) { held_ = std::move(what); }

 private:
  friend class RegionTable;
  static constexpr uint32_t kClosing = 1u << 31;
  bool is_used() const { return num_jobs_.load(std::memory_order_acquire) > 0; }
  std::shared_ptr<void> held_;
  std::atomic<uint32_t> state_{0};  // closing bit | number of touches
  std::atomic<uint32_t> num_jobs_{0};
};

using RegionRef = std::shared_ptr<Region>;

// Counts in and out of all regions one step works on (nearly always one).
class Touch {
 public:
  explicit Touch(const std::vector<RegionRef>& regions);
  ~Touch();
  Touch(const Touch&) = delete;
  Touch& operator=(const Touch&) = delete;
  explicit operator bool() const { return entered_ == regions_.size(); }

 private:
  const std::vector<RegionRef>& regions_;
  size_t entered_ = 0;
};

// Notified when a region has closed: nothing touches it, and new accesses fail.
class RegionListener {
 public:
  virtual ~RegionListener() = default;
  virtual void region_closed(const Region& region) = 0;
};

class RegionTable : public std::enable_shared_from_this<RegionTable> {  // as for Queue
 public:
  // Shared memory (memfd) of `size` bytes. Returns null and sets `error` when the machine will not
  // give it: populating reports missing memory here instead of as a SIGBUS at the first touch.
  RegionRef allocate(uint64_t size, bool huge_pages, bool populate, std::string& error);
  RegionRef add(uint64_t address, uint64_t size, bool is_writable, bool is_brief = false);  // memory of another owner
  RegionRef add_medium(uint64_t address, uint64_t size, bool is_writable, std::string kind,
                       std::shared_ptr<Medium> medium);
  // Closes the region, and returns once nothing touches it. A job takes whichever region contains its bytes, so the
  // job of one operation may work on the brief region of another that uses the same memory. Such a region is found no
  // more, but stays open until its jobs have ended: their operations keep the memory in its place, too.
  void remove(uint64_t key);
  void remove_all();  // closes also those that stay open for their jobs

  // The region around these bytes (`needs_write`: into which they may be moved), in use by one job more. Null: none.
  RegionRef use(uint64_t address, uint64_t length, bool needs_write) const;
  RegionRef find_key(uint64_t key) const;
  std::vector<RegionRef> all() const;

  void listen(std::weak_ptr<RegionListener> listener);

 private:
  void insert(const RegionRef& region);
  bool has_another_around(const Region& region) const;
  void close(Region& region);

  mutable std::shared_mutex mutex_;
  std::multimap<uint64_t, RegionRef> by_address_;
  std::unordered_map<uint64_t, RegionRef> by_key_;
  std::vector<RegionRef> removed_;  // and not closed: in use by jobs of other operations
  uint64_t largest_ = 0;            // bounds the search backwards when ranges overlap
  std::mutex listeners_mutex_;
  std::vector<std::weak_ptr<RegionListener>> listeners_;
};

uint64_t random_key();  // from the kernel, never zero

// The memfd of a shared region, mapped into this process; null when it is not what it claims to be.
RegionRef map_shared(int fd, uint64_t size, uint64_t key);

}  // namespace mooncake
