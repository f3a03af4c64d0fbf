// SPDX-License-Identifier: Apache-2.0
#include "cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <map>

#include "crc32c.h"

namespace mooncake::cuda {

namespace {

constexpr uint64_t kLeastStaging = 128 << 10, kMostStaging = 2 << 20;
constexpr size_t kSpareLanes = 4;  // per device; beyond them streams and buffers are given back

std::string kind_of(int device) { return "cuda:" + std::to_string(device); }

}  // namespace

// Plans -----------------------------------------------------------------------------------------------

bool Stager::next(Fill& fill) {
  fill.parts.clear(), fill.copies.clear();
  for (uint64_t at = 0; at < capacity_ && piece_ < pieces_.size();) {
    const Piece& piece = pieces_[piece_];
    uint64_t length = std::min(piece.length - offset_, capacity_ - at);
    if (length > 0) {
      fill.parts.push_back({piece_, offset_, length, at});
      uint64_t device = piece.device + offset_;
      if (!fill.copies.empty() && fill.copies.back().device + fill.copies.back().length == device)
        fill.copies.back().length += length;
      else fill.copies.push_back({device, length, at});
    }
    at += length, offset_ += length;
    if (offset_ == piece.length) piece_++, offset_ = 0;
  }
  return !fill.parts.empty();
}

// Four fillings or more, so that the processor and the device work at the same time.
uint64_t staging_bytes(std::span<const Piece> pieces) {
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.length;
  return std::clamp((total / 4 + 4095) / 4096 * 4096, kLeastStaging, kMostStaging);
}

std::vector<Hop> joined(std::span<const Hop> hops) {
  std::vector<Hop> result;
  for (const Hop& hop : hops) {
    if (hop.length == 0) continue;
    Hop* last = result.empty() ? nullptr : &result.back();
    if (last && last->to + last->length == hop.to && last->from + last->length == hop.from) last->length += hop.length;
    else result.push_back(hop);
  }
  return result;
}

bool lies_within(uint64_t offset, uint64_t size, uint64_t allocation_bytes) {
  return size <= allocation_bytes && offset <= allocation_bytes - size;
}

uint64_t identity_of_process() {
  static const uint64_t drawn = random_key();
  return drawn ^ static_cast<uint64_t>(getpid());
}

// Contexts and lanes ----------------------------------------------------------------------------------

struct Cuda::Placement {
  int device = 0;
  Pointer base = 0;  // of the allocation around it
  size_t size = 0;
};

// A stream and what pageable memory needs to get through it.
struct Cuda::Lane {
  const Driver& driver;
  Context context;
  Stream stream = nullptr;
  Event filled[2] = {};
  void* staging[2] = {};
  OwnProcess own_process;

  Lane(const Driver& driver, Context context) : driver(driver), context(context) {}
  ~Lane() {
    if (!own_process || driver.context_push(context) != kSuccess) return;
    for (Event event : filled)
      if (event) driver.event_destroy(event);
    for (void* buffer : staging)
      if (buffer) driver.host_free(buffer);
    if (stream) driver.stream_destroy(stream);
    driver.context_pop(&context);
  }
  Result open() { return driver.stream_create(&stream, kStreamNonBlocking); }
  Result need_staging() {
    for (int i = 0; i < 2; i++) {
      if (staging[i]) continue;
      if (Result result = driver.event_create(&filled[i], kEventNoTiming); result != kSuccess) return result;
      if (Result result = driver.host_allocate(&staging[i], kMostStaging, kHostPortable); result != kSuccess)
        return result;
    }
    return kSuccess;
  }
  uint8_t* buffer(size_t number) { return static_cast<uint8_t*>(staging[number % 2]); }
};

// Makes a device's context the calling thread's, and gives the thread back what it had.
class Cuda::Current {
 public:
  Current(Cuda& cuda, int device) : driver_(*cuda.driver_) {
    result = cuda.context(device, context);
    if (result == kSuccess) result = driver_.context_push(context);
  }
  ~Current() {
    Context popped;
    if (result == kSuccess) driver_.context_pop(&popped);
  }
  Result result;
  Context context = nullptr;

 private:
  const Driver& driver_;
};

// A lane for the time of one call. It goes back only if all it did went well.
class Cuda::Borrowed {
 public:
  Borrowed(Cuda& cuda, int device, Context context) : cuda_(cuda), device_(static_cast<size_t>(device)) {
    {
      std::lock_guard lock(cuda_.mutex_);
      auto& idle = cuda_.idle_[device_];
      if (!idle.empty()) lane = std::move(idle.back()), idle.pop_back();
    }
    if (lane) return;
    lane = std::make_unique<Lane>(*cuda_.driver_, context);
    result = lane->open();
  }
  // Waits until nothing is under way, also after a failure: the caller's memory is its own again.
  Result finish(Result so_far) {
    Result end = cuda_.driver_->stream_synchronize(lane->stream);
    if (so_far == kSuccess) so_far = end;
    std::lock_guard lock(cuda_.mutex_);
    auto& idle = cuda_.idle_[device_];
    if (so_far == kSuccess && idle.size() < kSpareLanes) idle.push_back(std::move(lane));
    return so_far;
  }
  std::unique_ptr<Lane> lane;
  Result result = kSuccess;

 private:
  Cuda& cuda_;
  const size_t device_;
};

Cuda::Cuda(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {}
Cuda::~Cuda() = default;

std::shared_ptr<Cuda> Cuda::open(const std::string& library, std::string& why) {
  static std::mutex mutex;
  // Never destroyed: at exit the driver may be gone before us.
  static auto& opened = *new std::map<std::string, std::shared_ptr<Cuda>>;
  std::lock_guard lock(mutex);
  auto& known = opened[library];
  if (known && known->own_process_) return known;
  if (known) return why = "this process was forked from one that used the device; start it anew", nullptr;
  std::shared_ptr<const Driver> driver = Driver::open(library, why);
  if (!driver) return nullptr;
  std::shared_ptr<Cuda> cuda(new Cuda(std::move(driver)));
  if (!cuda->start(why)) return nullptr;
  return known = cuda;
}

std::string Cuda::why_not_there(const std::string& library) {
  std::string why;
  (void)Driver::load(library, why);
  return why;
}

bool Cuda::is_device_memory(const std::string& library, uint64_t address) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!loaded) return false;
  auto ask = reinterpret_cast<decltype(Driver::pointer_attribute)>(dlsym(loaded, "cuPointerGetAttribute"));
  unsigned type = 0;
  bool is_device = ask && ask(&type, kPointerMemoryType, address) == kSuccess && type == kTypeDevice;
  dlclose(loaded);
  return is_device;
}

bool Cuda::start(std::string& why) {
  for (int number = 0; number < driver_->num_devices; number++) {
    Device device;
    char name[128] = {}, bus_id[16] = {};
    size_t size = 0;
    Result result = driver_->device_get(&device, number);
    if (result == kSuccess) result = driver_->device_name(name, sizeof name, device);
    if (result == kSuccess) result = driver_->device_bus_id(bus_id, sizeof bus_id, device);
    if (result == kSuccess) result = driver_->device_memory(&size, device);
    if (result != kSuccess) return why = "device " + std::to_string(number) + ": " + driver_->say(result), false;
    std::string lower(bus_id);
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    infos_.push_back({number, name, lower, size});
  }
  contexts_.resize(infos_.size());
  idle_.resize(infos_.size());
  reached_.resize(infos_.size() * infos_.size());
  return true;
}

Result Cuda::context(int device, Context& context) {
  std::lock_guard lock(mutex_);
  Context& known = contexts_[static_cast<size_t>(device)];
  Device number;
  if (!known) {
    if (Result result = driver_->device_get(&number, device); result != kSuccess) return result;
    if (Result result = driver_->context_retain(&known, number); result != kSuccess) return result;
  }
  context = known;
  return kSuccess;
}

// Copies ----------------------------------------------------------------------------------------------

Result Cuda::copy(int device, Toward toward, std::span<const Piece> pieces, bool is_pinned, uint32_t* checksums) {
  Current current(*this, device);
  if (current.result != kSuccess) return current.result;
  Borrowed borrowed(*this, device, current.context);
  if (borrowed.result != kSuccess) return borrowed.result;
  Lane& lane = *borrowed.lane;
  if (is_pinned) {
    Result result = borrowed.finish(copy_direct(lane, toward, pieces));
    if (result == kSuccess && checksums)
      for (size_t i = 0; i < pieces.size(); i++)
        checksums[i] = crc32c(reinterpret_cast<const void*>(pieces[i].host), pieces[i].length);
    return result;
  }
  Result result = lane.need_staging();
  if (result == kSuccess)
    result = toward == Toward::kDevice ? stage_in(lane, pieces, checksums) : stage_out(lane, pieces, checksums);
  return borrowed.finish(result);
}

Result Cuda::copy_direct(Lane& lane, Toward toward, std::span<const Piece> pieces) {
  Result result = kSuccess;
  for (size_t i = 0; i < pieces.size() && result == kSuccess; i++) {
    auto* host = reinterpret_cast<void*>(pieces[i].host);
    if (pieces[i].length == 0) continue;
    result = toward == Toward::kDevice ? driver_->copy_in(pieces[i].device, host, pieces[i].length, lane.stream)
                                       : driver_->copy_out(host, pieces[i].device, pieces[i].length, lane.stream);
  }
  return result;
}

// Pageable to device: a buffer is filled as soon as the device has read what was in it.
Result Cuda::stage_in(Lane& lane, std::span<const Piece> pieces, uint32_t* checksums) {
  if (checksums) std::fill_n(checksums, pieces.size(), 0);
  Stager stager(pieces, staging_bytes(pieces));
  Fill fill;
  for (size_t number = 0; stager.next(fill); number++) {
    Event filled = lane.filled[number % 2];
    Result result = number < 2 ? kSuccess : driver_->event_synchronize(filled);
    if (result != kSuccess) return result;
    for (const Fill::Part& part : fill.parts) {
      auto* from = reinterpret_cast<const uint8_t*>(pieces[part.piece].host + part.offset);
      uint8_t* to = lane.buffer(number) + part.at;
      if (checksums) checksums[part.piece] = copy_crc32c(to, from, part.length, checksums[part.piece], false);
      else std::memcpy(to, from, part.length);
    }
    for (const Fill::Copy& part : fill.copies) {
      result = driver_->copy_in(part.device, lane.buffer(number) + part.at, part.length, lane.stream);
      if (result != kSuccess) return result;
    }
    if (result = driver_->event_record(filled, lane.stream); result != kSuccess) return result;
  }
  return kSuccess;
}

// Device to pageable: a buffer is emptied while the device fills the other.
Result Cuda::stage_out(Lane& lane, std::span<const Piece> pieces, uint32_t* checksums) {
  if (checksums) std::fill_n(checksums, pieces.size(), 0);
  auto empty = [&](const Fill& fill, size_t number) {
    if (Result result = driver_->event_synchronize(lane.filled[number % 2]); result != kSuccess) return result;
    for (const Fill::Part& part : fill.parts) {
      auto* to = reinterpret_cast<uint8_t*>(pieces[part.piece].host + part.offset);
      const uint8_t* from = lane.buffer(number) + part.at;
      uint32_t* sum = checksums ? &checksums[part.piece] : nullptr;
      if (pieces[part.piece].host == 0) *sum = crc32c(from, part.length, *sum);
      else if (sum) *sum = copy_crc32c(to, from, part.length, *sum, false);
      else std::memcpy(to, from, part.length);
    }
    return kSuccess;
  };
  Stager stager(pieces, staging_bytes(pieces));
  Fill fills[2];
  size_t number = 0;
  for (; stager.next(fills[number % 2]); number++) {
    for (const Fill::Copy& part : fills[number % 2].copies) {
      Result result = driver_->copy_out(lane.buffer(number) + part.at, part.device, part.length, lane.stream);
      if (result != kSuccess) return result;
    }
    if (Result result = driver_->event_record(lane.filled[number % 2], lane.stream); result != kSuccess) return result;
    if (number == 0) continue;
    if (Result result = empty(fills[(number - 1) % 2], number - 1); result != kSuccess) return result;
  }
  return number == 0 ? kSuccess : empty(fills[(number - 1) % 2], number - 1);
}

Result Cuda::copy_between(int to, int from, std::span<const Hop> hops) {
  Context target, source;
  if (Result result = context(to, target); result != kSuccess) return result;
  if (Result result = context(from, source); result != kSuccess) return result;
  if (to != from) let_reach(from, to);
  Current current(*this, from);
  if (current.result != kSuccess) return current.result;
  Borrowed borrowed(*this, from, current.context);
  if (borrowed.result != kSuccess) return borrowed.result;
  Stream stream = borrowed.lane->stream;
  Result result = kSuccess;
  for (const Hop& hop : joined(hops)) {
    result = to == from ? driver_->copy_within(hop.to, hop.from, hop.length, stream)
                        : driver_->copy_across(hop.to, target, hop.from, source, hop.length, stream);
    if (result != kSuccess) break;
  }
  return borrowed.finish(result);
}

// Opens the direct way between two devices, once; without it the driver goes through main memory.
void Cuda::let_reach(int from, int to) {
  size_t pair = static_cast<size_t>(from) * infos_.size() + static_cast<size_t>(to);
  {
    std::lock_guard lock(mutex_);
    if (reached_[pair]) return;
    reached_[pair] = true;
  }
  Device near, far;
  int is_able = 0;
  if (driver_->device_get(&near, from) != kSuccess || driver_->device_get(&far, to) != kSuccess) return;
  if (driver_->device_can_access(&is_able, near, far) != kSuccess || !is_able) return;
  Context target;
  Current current(*this, from);
  if (current.result == kSuccess && context(to, target) == kSuccess) (void)driver_->enable_peer_access(target, 0);
}

// Memory ----------------------------------------------------------------------------------------------

bool Cuda::place(uint64_t address, uint64_t size, Placement& placement, std::string& why) {
  for (uint64_t at : {address, address + size - 1}) {
    unsigned type = 0;
    int device = 0;
    Result result = driver_->pointer_attribute(&type, kPointerMemoryType, at);
    if (result == kSuccess) result = driver_->pointer_attribute(&device, kPointerDevice, at);
    bool is_here = result == kSuccess && type == kTypeDevice && (at == address || device == placement.device);
    if (!is_here) return why = "not device memory of one device, or freed", false;
    placement.device = device;
  }
  Current current(*this, placement.device);
  Result result = current.result;
  if (result == kSuccess) result = driver_->address_range(&placement.base, &placement.size, address);
  if (result != kSuccess) why = driver_->say(result);
  return result == kSuccess;
}

// Memory of some allocators (virtual memory ranges, pools, managed memory) has no handle of this sort.
std::optional<Export> Cuda::exported(const Placement& placement, uint64_t address, uint64_t size, bool is_writable) {
  Export shown;
  Current current(*this, placement.device);
  if (current.result != kSuccess || driver_->ipc_export(&shown.handle, placement.base) != kSuccess) return {};
  shown.offset = address - placement.base;
  if (!lies_within(shown.offset, size, placement.size)) return {};
  shown.address = address;
  shown.process = identity_of_process();
  shown.is_read_only = !is_writable;
  infos_[static_cast<size_t>(placement.device)].bus_id.copy(shown.bus_id, sizeof shown.bus_id - 1);
  return shown;
}

RegionRef Cuda::add(RegionTable& table, uint64_t address, uint64_t size, bool is_writable, std::string& why) {
  Placement placement;
  if (size == 0 || !place(address, size, placement, why)) return nullptr;
  unsigned yes = 1;  // synchronous copies of others are finished before a network card looks
  (void)driver_->set_pointer_attribute(&yes, kPointerSyncMemops, placement.base);
  auto memory = std::make_shared<DeviceMemory>(shared_from_this(), placement.device, address, nullptr,
                                               exported(placement, address, size, is_writable));
  return table.add_medium(address, size, is_writable, kind_of(placement.device), memory);
}

RegionRef Cuda::allocate(RegionTable& table, int device, uint64_t size, std::string& why) {
  Pointer address = 0;
  {
    Current current(*this, device);
    Result result = current.result;
    if (result == kSuccess) result = driver_->allocate(&address, size);
    if (result == kSuccess) result = driver_->fill(address, 0, size);
    if (result == kSuccess) result = driver_->stream_synchronize(nullptr);  // our streams would not wait for it
    if (result != kSuccess) {
      if (address) driver_->free(address);
      return why = driver_->say(result), nullptr;
    }
  }
  std::shared_ptr<void> allocation(this, [self = shared_from_this(), device, address](void*) {
    if (!self->own_process_) return;
    Current current(*self, device);
    if (current.result == kSuccess) self->driver_->free(address);
  });
  Placement placement{device, address, size};
  auto memory = std::make_shared<DeviceMemory>(shared_from_this(), device, address, allocation,
                                               exported(placement, address, size, true));
  return table.add_medium(address, size, true, kind_of(device), memory);
}

RegionRef Cuda::import(const Export& from, uint64_t size, uint64_t key, std::string& why) {
  auto is_it = [&](const DeviceInfo& info) {
    return info.bus_id == std::string(from.bus_id, strnlen(from.bus_id, 16));
  };
  auto found = std::find_if(infos_.begin(), infos_.end(), is_it);
  int device = found == infos_.end() ? 0 : found->number;  // a device hidden from us may still be opened
  uint64_t address = from.address;
  std::shared_ptr<void> allocation;
  if (from.process != identity_of_process()) {
    Pointer base = 0;
    allocation = opened(device, from.handle, base, why);
    if (!allocation) return nullptr;
    address = base + from.offset;
  }
  Placement placement;
  if (!place(address, size, placement, why)) return nullptr;
  if (!lies_within(address - placement.base, size, placement.size)) return why = "it ends earlier than said", nullptr;
  auto memory = std::make_shared<DeviceMemory>(shared_from_this(), placement.device, address, nullptr, std::nullopt);
  auto region = std::make_shared<Region>(address, size, key, !from.is_read_only, kind_of(placement.device), memory);
  region->hold_while_open(std::move(allocation));  // its owner may free it as soon as we say that we closed it
  return region;
}

std::shared_ptr<void> Cuda::opened(int device, const IpcHandle& handle, Pointer& base, std::string& why) {
  std::lock_guard lock(open_mutex_);
  std::erase_if(opened_, [](const Opened& entry) { return entry.allocation.expired(); });
  for (const Opened& entry : opened_)
    if (std::memcmp(&entry.handle, &handle, sizeof handle) == 0)
      if (auto allocation = entry.allocation.lock()) return base = entry.base, allocation;
  Current current(*this, device);
  Result result = current.result;
  if (result == kSuccess) result = driver_->ipc_open(&base, handle, kIpcLazyPeerAccess);
  if (result != kSuccess) return why = driver_->say(result), nullptr;
  std::shared_ptr<void> allocation(this, [self = shared_from_this(), device, base](void*) {
    if (!self->own_process_) return;
    Current current(*self, device);
    if (current.result == kSuccess) self->driver_->ipc_close(base);
  });
  opened_.push_back({handle, base, allocation});
  return allocation;
}

Result Cuda::lock_pages(uint64_t address, uint64_t size) {
  Current current(*this, 0);
  if (current.result != kSuccess) return current.result;
  return driver_->host_register(reinterpret_cast<void*>(address), size, kHostPortable);
}

std::string Cuda::pin(Region& region) {
  if (region.medium || region.size == 0) return "only main memory can be pinned";
  if (is_pinned(region)) return "";
  if (Result result = lock_pages(region.address, region.size); result != kSuccess) return driver_->say(result);
  region.hold_while_open(std::shared_ptr<void>(this, [self = shared_from_this(), at = region.address](void*) {
    Current current(*self, 0);
    if (self->own_process_ && current.result == kSuccess) self->driver_->host_unregister(reinterpret_cast<void*>(at));
  }));
  return "";
}

// Pinned by us or by others (pinned tensors). Checked at both ends, because the driver knows no ranges.
bool Cuda::is_pinned(const Region& region) {
  auto is_known = [&](uint64_t at) {
    unsigned type = 0;
    return driver_->pointer_attribute(&type, kPointerMemoryType, at) == kSuccess && type == kTypeHost;
  };
  return region.size > 0 && is_known(region.address) && is_known(region.address + region.size - 1);
}

int Cuda::dma_buf(uint64_t address, uint64_t size, uint64_t& offset) {
  Placement placement;
  std::string why;
  Device device;
  int is_able = 0, fd = -1;
  if (!driver_->handle_for_range || size == 0 || !place(address, size, placement, why)) return -1;
  if (driver_->device_get(&device, placement.device) != kSuccess ||
      driver_->device_attribute(&is_able, kAttributeDmaBuf, device) != kSuccess || !is_able)
    return -1;
  uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t begin = address / page * page, end = (address + size + page - 1) / page * page;
  Current current(*this, placement.device);
  if (current.result != kSuccess || driver_->handle_for_range(&fd, begin, end - begin, kDmaBufFd, 0) != kSuccess)
    return -1;
  offset = address - begin;
  return fd;
}

// The bytes that pass through a server or a job in windows do so in one block each: pinning it once
// saves them the second staging.
bool Cuda::is_pinned_staging(const void* memory) {
  Staging* const blocks[] = {&Staging::serving(), &Staging::moving()};
  for (int i = 0; i < 2; i++) {
    auto* base = blocks[i]->base();
    if (memory < base || memory >= base + Staging::size()) continue;
    std::lock_guard lock(staging_mutex_);
    if (staging_[i] == Pinned::kUnknown)
      staging_[i] = lock_pages(reinterpret_cast<uint64_t>(base), Staging::size()) ? Pinned::kNo : Pinned::kYes;
    return staging_[i] == Pinned::kYes;
  }
  return false;
}

Outcome outcome_of(Result result) {
  if (result == kSuccess) return {};
  return {Status::kIoError, result == kOutOfMemory ? ENOMEM : EIO};
}

Outcome DeviceMemory::read(uint64_t offset, void* into, uint64_t length) {
  Piece piece{reinterpret_cast<uint64_t>(into), address + offset, length};
  return outcome_of(cuda->copy(device, Toward::kHost, {&piece, 1}, cuda->is_pinned_staging(into), nullptr));
}

Outcome DeviceMemory::write(uint64_t offset, const void* from, uint64_t length) {
  Piece piece{reinterpret_cast<uint64_t>(from), address + offset, length};
  return outcome_of(cuda->copy(device, Toward::kDevice, {&piece, 1}, cuda->is_pinned_staging(from), nullptr));
}

bool is_device_memory(const Medium& medium) { return dynamic_cast<const DeviceMemory*>(&medium) != nullptr; }

const DeviceMemory* device_memory(const Region& region) {
  return dynamic_cast<const DeviceMemory*>(region.medium.get());
}

}  // namespace mooncake::cuda
