// SPDX-License-Identifier: Apache-2.0
// Device memory: which memory it is, how bytes get in and out of it, how another process opens it.
//
// Between device and main memory bytes go on streams of our own, which wait for no other work of the
// process. Pinned main memory is copied directly; pageable memory through two pinned buffers, of which
// one is filled or emptied by the processor while the device copies the other:
//
//     pageable ──memcpy──▶ pinned A ──▶ device        slices are packed, so that many small ones whose
//              ──memcpy──▶ pinned B ──▶               device sides touch become one copy
//
// A call returns when its bytes have arrived and cannot be stopped half way, so callers hand over
// bounded portions and look at deadlines between them. Work of other streams on the same bytes is the
// caller's to finish first.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cuda_driver.h"
#include "region.h"
#include "transport.h"

namespace mooncake::cuda {

constexpr uint64_t kPortion = 64 << 20;  // moved between looks at stop and deadline

struct DeviceInfo {
  int number;  // in this process
  std::string name;
  std::string bus_id;  // the same in every process and in sysfs: 0000:17:00.0
  uint64_t size;
};

// Bytes at one place in main memory and at another in device memory. Towards main memory, a null
// `host` means: only checksum them.
struct Piece {
  uint64_t host, device, length;
};

enum class Toward : uint8_t { kDevice, kHost };

// One filling of a staging buffer.
struct Fill {
  struct Part {  // so many bytes of a piece, from its `offset`, lie in the buffer from `at`
    size_t piece;
    uint64_t offset, length, at;
  };
  struct Copy {
    uint64_t device, length, at;
  };
  std::vector<Part> parts;
  std::vector<Copy> copies;
};

// Cuts pieces into fillings of at most `capacity` bytes, in order.
class Stager {
 public:
  Stager(std::span<const Piece> pieces, uint64_t capacity) : pieces_(pieces), capacity_(capacity) {}
  bool next(Fill& fill);  // false: nothing is left

 private:
  const std::span<const Piece> pieces_;
  const uint64_t capacity_;
  size_t piece_ = 0;
  uint64_t offset_ = 0;
};

uint64_t staging_bytes(std::span<const Piece> pieces);  // what one of the two buffers should take

// Bytes of one device that go to another, or elsewhere on the same.
struct Hop {
  uint64_t to, from, length;
};

std::vector<Hop> joined(std::span<const Hop> hops);  // neighbours on both sides become one

// How another process finds a range. The handle stands for the whole allocation around it.
struct Export {
  IpcHandle handle{};
  uint64_t offset = 0;   // of the range in its allocation
  uint64_t address = 0;  // in its owner, for another engine of the same process: that may not open the handle
  uint64_t process = 0;  // identity_of_process() of its owner
  char bus_id[16] = {};  // of the device
  // Zero, as in what earlier releases send: peers may write. The driver gives them no handle that only reads, so those
  // who open it are asked to keep to this.
  uint8_t is_read_only = 0;
  uint8_t reserved[7] = {};  // so that a later release can send something here
};

uint64_t identity_of_process();                                               // random; another one in a forked child
bool lies_within(uint64_t offset, uint64_t size, uint64_t allocation_bytes);  // and does not wrap around

class Cuda;

// The device side of a region: kept alive by it, keeps the allocation alive.
class DeviceMemory final : public Medium {
 public:
  DeviceMemory(std::shared_ptr<Cuda> cuda, int device, uint64_t address, std::shared_ptr<void> allocation,
               std::optional<Export> shown)
      : cuda(std::move(cuda)), device(device), address(address), shown(shown), allocation_(std::move(allocation)) {}
  Outcome read(uint64_t offset, void* into, uint64_t length) override;
  Outcome write(uint64_t offset, const void* from, uint64_t length) override;
  bool is_shared() const override { return shown.has_value(); }

  const std::shared_ptr<Cuda> cuda;
  const int device;
  const uint64_t address;
  const std::optional<Export> shown;  // none: other processes cannot open this kind of allocation

 private:
  const std::shared_ptr<void> allocation_;
};

// The device memory behind a region, or null.
const DeviceMemory* device_memory(const Region& region);
bool is_device_memory(const Medium& medium);

Outcome outcome_of(Result result);  // what of a driver's errors a completion can say

class Cuda : public std::enable_shared_from_this<Cuda> {
 public:
  // The devices behind the driver in `library`, once per library and process. Null and `why` when there
  // are none.
  static std::shared_ptr<Cuda> open(const std::string& library, std::string& why);
  // Empty when the library can be loaded; whether it finds a device is known when it is opened.
  static std::string why_not_there(const std::string& library);
  // Is `address` device memory of a driver that this process uses already? Opens and starts nothing.
  static bool is_device_memory(const std::string& library, uint64_t address);
  ~Cuda();

  const std::vector<DeviceInfo>& devices() const { return infos_; }

  // Registers device memory that another owner allocated; null and `why` when it is no device memory.
  RegionRef add(RegionTable& table, uint64_t address, uint64_t size, bool is_writable, std::string& why);
  // Zeroed device memory, freed with the region.
  RegionRef allocate(RegionTable& table, int device, uint64_t size, std::string& why);
  // What another process exported; an allocation is opened once, however many of its ranges are used.
  RegionRef import(const Export& from, uint64_t size, uint64_t key, std::string& why);

  // Locks main memory until the region is closed: copies from and to it need no staging. Empty, or why not.
  std::string pin(Region& region);
  bool is_pinned(const Region& region);
  bool is_pinned_staging(const void* memory);  // of a server or a job; pinned at the first call

  // Each returns when the bytes have arrived. `checksums`: CRC32C of each piece, or null.
  Result copy(int device, Toward toward, std::span<const Piece> pieces, bool is_pinned, uint32_t* checksums);
  Result copy_between(int to, int from, std::span<const Hop> hops);

  // A dma-buf around device memory, for a network card, and where the memory begins in it. The caller
  // closes it; -1 where there is none.
  int dma_buf(uint64_t address, uint64_t size, uint64_t& offset);

 private:
  struct Lane;
  struct Placement;
  class Current;
  class Borrowed;

  explicit Cuda(std::shared_ptr<const Driver> driver);
  bool start(std::string& why);
  Result context(int device, Context& context);
  bool place(uint64_t address, uint64_t size, Placement& placement, std::string& why);
  std::optional<Export> exported(const Placement& placement, uint64_t address, uint64_t size, bool is_writable);
  std::shared_ptr<void> opened(int device, const IpcHandle& handle, Pointer& base, std::string& why);
  Result stage_in(Lane& lane, std::span<const Piece> pieces, uint32_t* checksums);
  Result stage_out(Lane& lane, std::span<const Piece> pieces, uint32_t* checksums);
  Result copy_direct(Lane& lane, Toward toward, std::span<const Piece> pieces);
  void let_reach(int from, int to);
  Result lock_pages(uint64_t address, uint64_t size);

  const std::shared_ptr<const Driver> driver_;
  const OwnProcess own_process_;
  std::vector<DeviceInfo> infos_;
  std::mutex mutex_;
  std::vector<Context> contexts_;  // the primary ones, kept once used
  std::vector<std::vector<std::unique_ptr<Lane>>> idle_;
  struct Opened {
    IpcHandle handle;
    Pointer base;
    std::weak_ptr<void> allocation;
  };
  std::mutex open_mutex_;
  std::vector<Opened> opened_;  // other processes' allocations that are open here
  std::vector<bool> reached_;   // from * devices + to
  enum class Pinned : uint8_t { kUnknown, kYes, kNo };
  std::mutex staging_mutex_;
  Pinned staging_[2] = {};  // Staging::serving(), Staging::moving()
};

}  // namespace mooncake::cuda
