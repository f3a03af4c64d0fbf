// SPDX-License-Identifier: Apache-2.0
#include "region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace mooncake {

namespace {

constexpr uint64_t kHugePage = 2u << 20;
constexpr uint64_t kPage = 4096;

std::string why(const char* step, int error) { return std::string(step) + ": " + std::strerror(error); }

// Sealed memory cannot shrink under a mapping, so no peer can turn a copy into a SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A mapping that starts on a huge page boundary, so that all of it can be huge pages.
void* map_aligned(int fd, uint64_t size) {
  uint64_t room = size + kHugePage;
  void* reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  auto start = reinterpret_cast<uint64_t>(reserved);
  uint64_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(reserved, aligned - start);
  uint64_t end = aligned + size;
  if (start + room > end) munmap(reinterpret_cast<void*>(end), start + room - end);
  void* mapped = mmap(reinterpret_cast<void*>(aligned), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) munmap(reinterpret_cast<void*>(aligned), size);
  return mapped;
}

uint64_t round_up(uint64_t size) { return (size + kPage - 1) / kPage * kPage; }

}  // namespace

uint64_t random_key() {
  uint64_t key = 0;
  while (key == 0) {
    if (getrandom(&key, sizeof key, 0) != sizeof key) key = 0;
  }
  return key;
}

Region::Region(uint64_t address, uint64_t size, uint64_t key, int fd, bool is_writable, bool is_brief)
    : address(address), size(size), key(key), fd(fd), is_writable(is_writable), is_brief(is_brief) {}

Region::Region(uint64_t address, uint64_t size, uint64_t key, bool is_writable, std::string kind,
               std::shared_ptr<Medium> medium)
    : address(address),
      size(size),
      key(key),
      fd(-1),
      is_writable(is_writable),
      kind(std::move(kind)),
      medium(std::move(medium)) {}

Region::~Region() {
  if (fd < 0) return;
  munmap(reinterpret_cast<void*>(address), round_up(size));
  ::close(fd);
}

bool Region::enter() {
  if (state_.fetch_add(1, std::memory_order_acquire) & kClosing) {
    leave();
    return false;
  }
  return true;
}

void Region::leave() {
  if (state_.fetch_sub(1, std::memory_order_release) & kClosing) state_.notify_all();
}

void Region::close() {
  uint32_t seen = state_.fetch_or(kClosing, std::memory_order_acq_rel) | kClosing;
  while (seen != kClosing) {
    state_.wait(seen, std::memory_order_acquire);
    seen = state_.load(std::memory_order_acquire);
  }
  held_.reset();
}

Touch::Touch(const std::vector<RegionRef>& regions) : regions_(regions) {
  while (entered_ < regions_.size() && regions_[entered_]->enter()) entered_++;
}

Touch::~Touch() {
  for (size_t i = 0; i < entered_; i++) regions_[i]->leave();
}

RegionRef RegionTable::allocate(uint64_t size, bool huge_pages, bool populate, std::string& error) {
  int fd = memfd_create("mooncake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return error = why("memfd_create", errno), nullptr;
  uint64_t mapped_size = round_up(size);
  if (ftruncate(fd, static_cast<off_t>(mapped_size)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    error = why("sizing the memfd", errno);
    ::close(fd);
    return nullptr;
  }
  void* memory = map_aligned(fd, mapped_size);
  if (memory == MAP_FAILED) {
    error = why("mmap", errno);
    ::close(fd);
    return nullptr;
  }
  auto region = std::make_shared<Region>(reinterpret_cast<uint64_t>(memory), size, random_key(), fd);
  if (huge_pages) madvise(memory, mapped_size, MADV_HUGEPAGE);  // a wish: without it the region still works
  if (populate && madvise(memory, mapped_size, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    error = why("populating the memory", errno);
    return nullptr;
  }
  // Most systems give shared memory no huge pages by themselves; requested afterwards they do (Linux 6.1), and a
  // peer then maps 2 MiB per fault and a device takes 2 MiB per segment: O_DIRECT is twice as fast into them.
  if (huge_pages && populate) madvise(memory, mapped_size, MADV_COLLAPSE);
  insert(region);
  return region;
}

RegionRef RegionTable::add(uint64_t address, uint64_t size, bool is_writable, bool is_brief) {
  auto region = std::make_shared<Region>(address, size, random_key(), -1, is_writable, is_brief);
  insert(region);
  return region;
}

RegionRef RegionTable::add_medium(uint64_t address, uint64_t size, bool is_writable, std::string kind,
                                  std::shared_ptr<Medium> medium) {
  auto region = std::make_shared<Region>(address, size, random_key(), is_writable, std::move(kind), std::move(medium));
  insert(region);
  return region;
}

void RegionTable::insert(const RegionRef& region) {
  std::unique_lock lock(mutex_);
  by_address_.emplace(region->address, region);
  by_key_.emplace(region->key, region);
  largest_ = std::max(largest_, region->size);
}

// Whether a registered region overlaps with this one, which has left the table.
bool RegionTable::has_another_around(const Region& region) const {
  auto entry = by_address_.lower_bound(region.address + region.size);
  while (entry != by_address_.begin()) {
    --entry;
    if (entry->second->overlaps(region)) return true;
    if (entry->first < region.address && region.address - entry->first > largest_) break;
  }
  return false;
}

void RegionTable::remove(uint64_t key) {
  RegionRef region;
  std::vector<RegionRef> unused;  // removed before, and their last job has ended since
  {
    std::unique_lock lock(mutex_);
    auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    region = found->second;
    by_key_.erase(found);
    auto [begin, end] = by_address_.equal_range(region->address);
    by_address_.erase(std::find_if(begin, end, [&](auto& entry) { return entry.second == region; }));
    auto is_used = [](const RegionRef& removed) { return removed->is_used(); };
    auto middle = std::stable_partition(removed_.begin(), removed_.end(), is_used);
    unused.assign(std::make_move_iterator(middle), std::make_move_iterator(removed_.end()));
    removed_.erase(middle, removed_.end());
    // Where no other region is around it, its jobs are its own operation's, whose memory may go when we return.
    if (region->is_brief && region->is_used() && has_another_around(*region)) removed_.push_back(std::move(region));
  }
  if (region) close(*region);
  for (const RegionRef& removed : unused) close(*removed);
}

void RegionTable::close(Region& region) {
  region.close();
  std::vector<std::shared_ptr<RegionListener>> listeners;
  {
    std::lock_guard lock(listeners_mutex_);
    std::erase_if(listeners_, [](auto& listener) { return listener.expired(); });
    for (auto& weak : listeners_)
      if (auto listener = weak.lock()) listeners.push_back(std::move(listener));
  }
  for (auto& listener : listeners) listener->region_closed(region);
}

void RegionTable::remove_all() {
  std::vector<RegionRef> regions;
  {
    std::unique_lock lock(mutex_);
    regions.swap(removed_);
    for (auto& [address, region] : by_address_) regions.push_back(region);
    by_address_.clear(), by_key_.clear();
  }
  for (const RegionRef& region : regions) close(*region);
}

// Counted under the mutex, so that remove() knows of every job that has found a brief region.
RegionRef RegionTable::use(uint64_t address, uint64_t length, bool needs_write) const {
  std::shared_lock lock(mutex_);
  auto entry = by_address_.upper_bound(address);
  while (entry != by_address_.begin()) {
    --entry;
    Region& region = *entry->second;
    if (region.contains(address, length) && (region.is_writable || !needs_write)) {
      if (region.is_brief) region.num_jobs_.fetch_add(1, std::memory_order_relaxed);
      return entry->second;
    }
    if (address - entry->first > largest_) break;
  }
  return nullptr;
}

RegionRef RegionTable::find_key(uint64_t key) const {
  std::shared_lock lock(mutex_);
  auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

std::vector<RegionRef> RegionTable::all() const {
  std::shared_lock lock(mutex_);
  std::vector<RegionRef> regions;
  for (auto& [address, region] : by_address_) regions.push_back(region);
  return regions;
}

void RegionTable::listen(std::weak_ptr<RegionListener> listener) {
  std::lock_guard lock(listeners_mutex_);
  // What a weak pointer leads to keeps its memory, so peers that came and went would add up.
  std::erase_if(listeners_, [](const auto& known) { return known.expired(); });
  listeners_.push_back(std::move(listener));
}

RegionRef map_shared(int fd, uint64_t size, uint64_t key) {
  struct stat status{};
  int seals = fcntl(fd, F_GET_SEALS);
  if (size == 0 || seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &status) != 0 ||
      static_cast<uint64_t>(status.st_size) != round_up(size)) {
    ::close(fd);
    return nullptr;
  }
  void* memory = map_aligned(fd, round_up(size));
  if (memory == MAP_FAILED) {
    ::close(fd);
    return nullptr;
  }
  madvise(memory, round_up(size), MADV_HUGEPAGE);
  return std::make_shared<Region>(reinterpret_cast<uint64_t>(memory), size, key, fd);
}

}  // namespace mooncake
