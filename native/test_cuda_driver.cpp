// SPDX-License-Identifier: Apache-2.0
// A test double of the CUDA driver: a shared library with libcuda's interface over main memory, built
// for tests only and never installed. Where the real driver is lenient it is strict: device addresses
// cannot be touched by the processor (their pages have no access), copies run late and on another
// thread, every call needs a current context, asynchronous copies take pinned memory only, and ranges
// must lie in one allocation. So a forgotten wait, a device address used as a pointer or a copy past an
// end shows up here, under the sanitizers too.
//
// What it cannot show: that a real driver takes these calls, speed, peer access between real devices,
// device errors, other processes' kernels, dma-buf (it hands out the memfd instead).

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

using Result = int;
using Pointer = unsigned long long;
constexpr Result kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101,
                 kInvalidContext = 201, kAlreadyEnabled = 704;
constexpr int kNumDevices = 2;
constexpr size_t kDeviceBytes = 1ull << 30;

struct IpcHandle {
  char bytes[64];
};
struct IpcContents {  // what lies in the handle
  uint64_t magic, size;
  int pid, fd, device;
};
constexpr uint64_t kMagic = 0x656c62756f64;  // "double"

struct Context {
  int device;
  std::set<int> peers{};
};

// Bytes of one device, ours or another process's: an address that may not be touched, and where they really are.
struct Allocation {
  Pointer device_address;
  uint8_t* bytes;
  size_t size, mapped;
  int fd, device, opened;  // opened: times opened from another process; 0: our own
  IpcHandle handle{};
  ~Allocation() {
    munmap(bytes, mapped);
    munmap(reinterpret_cast<void*>(device_address), mapped);
    close(fd);
  }
};

struct Stream {
  int device;
  std::mutex mutex{};
  std::condition_variable changed{};
  std::deque<std::function<void()>> tasks{};
  bool is_busy = false, is_over = false;
  std::thread thread{};

  explicit Stream(int device) : device(device) {
    thread = std::thread([this] { work(); });
  }
  ~Stream() {
    {
      std::lock_guard lock(mutex);
      is_over = true;
      changed.notify_all();
    }
    thread.join();
  }
  void add(std::function<void()> task) {
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return tasks.empty() && !is_busy; });
  }
  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return is_over || !tasks.empty(); });
      if (tasks.empty()) return;
      auto task = std::move(tasks.front());
      tasks.pop_front();
      is_busy = true;
      lock.unlock();
      std::this_thread::yield();  // late, as a device would be
      task();
      lock.lock();
      is_busy = false;
      changed.notify_all();
    }
  }
};

struct Event {
  std::mutex mutex{};
  std::condition_variable changed{};
  uint64_t recorded = 0, reached = 0;
};

std::atomic<bool> is_initialised{false};
std::mutex mutex;
std::map<Pointer, std::shared_ptr<Allocation>> allocations;  // by device address
std::map<uint64_t, size_t> pinned;                           // main memory known to the "device"
std::atomic<int> num_streams{0}, num_events{0};
Context primary[kNumDevices] = {{0}, {1}};
thread_local std::vector<Context*> current;

std::shared_ptr<Allocation> allocation_of(Pointer at, size_t size) {
  std::lock_guard lock(mutex);
  auto after = allocations.upper_bound(at);
  if (after == allocations.begin()) return nullptr;
  auto& found = std::prev(after)->second;
  uint64_t offset = at - found->device_address;
  return offset < found->size && size <= found->size - offset ? found : nullptr;
}

bool is_pinned(const void* memory, size_t size) {
  auto at = reinterpret_cast<uint64_t>(memory);
  std::lock_guard lock(mutex);
  auto after = pinned.upper_bound(at);
  if (after == pinned.begin()) return false;
  auto [start, length] = *std::prev(after);
  return at - start <= length && size <= length - (at - start);
}

std::shared_ptr<Allocation> map(int fd, size_t size, int device) {
  size_t mapped = (size + 4095) / 4096 * 4096;
  void* bytes = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* hole = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (bytes == MAP_FAILED || hole == MAP_FAILED) return nullptr;
  auto made = std::make_shared<Allocation>(reinterpret_cast<Pointer>(hole), static_cast<uint8_t*>(bytes), size, mapped,
                                           fd, device, 0);
  std::lock_guard lock(mutex);
  return allocations[made->device_address] = made;
}

Result copy(const std::shared_ptr<Allocation>& target, Pointer to, const std::shared_ptr<Allocation>& source,
            Pointer from, size_t size, Stream* stream) {
  if (!target || !source) return kInvalidValue;
  stream->add([=] {
    std::memmove(target->bytes + (to - target->device_address), source->bytes + (from - source->device_address), size);
  });
  return kOk;
}

// Not waited for by streams of their own, as with the real driver's non-blocking ones.
Stream& default_stream() {
  static auto* stream = new Stream(0);
  return *stream;
}

Result ready() {
  if (!is_initialised) return kNotInitialized;
  return current.empty() ? kInvalidContext : kOk;
}

}  // namespace

extern "C" {

Result cuInit(unsigned) { return is_initialised = true, kOk; }
Result cuDriverGetVersion(int* version) { return *version = 12040, kOk; }
Result cuGetErrorName(Result result, const char** name) { return *name = result ? "DOUBLE_ERROR" : "SUCCESS", kOk; }
Result cuGetErrorString(Result result, const char** text) {
  static const std::map<Result, const char*> texts = {{kInvalidValue, "invalid argument"},
                                                      {kOutOfMemory, "out of memory"},
                                                      {kInvalidContext, "invalid device context"}};
  auto found = texts.find(result);
  return *text = found == texts.end() ? "some error" : found->second, kOk;
}

Result cuDeviceGetCount(int* count) { return *count = kNumDevices, is_initialised ? kOk : kNotInitialized; }
Result cuDeviceGet(int* device, int number) { return *device = number, number < kNumDevices ? kOk : kInvalidDevice; }
Result cuDeviceGetName(char* name, int length, int) { return snprintf(name, length, "Test double"), kOk; }
Result cuDeviceGetPCIBusId(char* id, int length, int device) {
  return snprintf(id, length, "0000:%02X:00.0", 0xda + device), kOk;
}
Result cuDeviceTotalMem_v2(size_t* size, int) { return *size = kDeviceBytes, kOk; }
Result cuDeviceGetAttribute(int* value, int, int) { return *value = 1, kOk; }
Result cuDeviceCanAccessPeer(int* is_able, int, int) { return *is_able = 1, kOk; }

Result cuDevicePrimaryCtxRetain(Context** context, int device) { return *context = &primary[device], kOk; }
Result cuCtxPushCurrent_v2(Context* context) { return current.push_back(context), kOk; }
Result cuCtxPopCurrent_v2(Context** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kOk;
}
Result cuCtxEnablePeerAccess(Context* peer, unsigned) {
  if (Result result = ready()) return result;
  std::lock_guard lock(mutex);
  return current.back()->peers.insert(peer->device).second ? kOk : kAlreadyEnabled;
}

Result cuPointerGetAttribute(void* value, int attribute, Pointer at) {
  if (!is_initialised) return kNotInitialized;
  auto found = allocation_of(at, 1);
  bool is_host = !found && is_pinned(reinterpret_cast<void*>(at), 1);
  if (!found && !is_host) return kInvalidValue;
  if (attribute == 2) *static_cast<unsigned*>(value) = found ? 2 : 1;
  else if (attribute == 9) *static_cast<int*>(value) = found ? found->device : 0;
  else return kInvalidValue;
  return kOk;
}
Result cuPointerSetAttribute(const void*, int, Pointer at) { return allocation_of(at, 1) ? kOk : kInvalidValue; }
Result cuMemGetAddressRange_v2(Pointer* base, size_t* size, Pointer at) {
  if (Result result = ready()) return result;
  auto found = allocation_of(at, 1);
  if (!found) return kInvalidValue;
  return *base = found->device_address, *size = found->size, kOk;
}

Result cuMemAlloc_v2(Pointer* address, size_t size) {
  if (Result result = ready()) return result;
  if (size == 0) return kInvalidValue;
  if (size > kDeviceBytes) return kOutOfMemory;
  int fd = memfd_create("cuda-double", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>((size + 4095) / 4096 * 4096)) != 0) return kOutOfMemory;
  auto made = map(fd, size, current.back()->device);
  if (!made) return kOutOfMemory;
  std::memset(made->bytes, 0xa5, size);  // not zero, as real memory need not be
  return *address = made->device_address, kOk;
}
Result cuMemFree_v2(Pointer address) {
  if (Result result = ready()) return result;
  std::lock_guard lock(mutex);
  auto found = allocations.find(address);
  if (found == allocations.end() || found->second->opened) return kInvalidValue;
  return allocations.erase(found), kOk;
}
Result cuMemsetD8_v2(Pointer at, unsigned char value, size_t size) {
  if (Result result = ready()) return result;
  auto found = allocation_of(at, size);
  if (!found) return kInvalidValue;
  default_stream().add([=] { std::memset(found->bytes + (at - found->device_address), value, size); });
  return kOk;
}

Result cuMemHostAlloc(void** memory, size_t size, unsigned) {
  if (Result result = ready()) return result;
  *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*memory == MAP_FAILED) return kOutOfMemory;
  std::lock_guard lock(mutex);
  return pinned[reinterpret_cast<uint64_t>(*memory)] = size, kOk;
}
Result cuMemFreeHost(void* memory) {
  std::lock_guard lock(mutex);
  auto found = pinned.find(reinterpret_cast<uint64_t>(memory));
  if (found == pinned.end()) return kInvalidValue;
  munmap(memory, found->second);
  return pinned.erase(found), kOk;
}
Result cuMemHostRegister_v2(void* memory, size_t size, unsigned) {
  if (Result result = ready()) return result;
  std::lock_guard lock(mutex);
  return pinned.try_emplace(reinterpret_cast<uint64_t>(memory), size).second ? kOk : 712;
}
Result cuMemHostUnregister(void* memory) {
  std::lock_guard lock(mutex);
  return pinned.erase(reinterpret_cast<uint64_t>(memory)) ? kOk : 713;
}

Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t size, Stream* stream) {
  if (Result result = ready()) return result;
  auto target = allocation_of(to, size);
  if (!target || !is_pinned(from, size)) return kInvalidValue;
  stream->add([=] { std::memcpy(target->bytes + (to - target->device_address), from, size); });
  return kOk;
}
Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t size, Stream* stream) {
  if (Result result = ready()) return result;
  auto source = allocation_of(from, size);
  if (!source || !is_pinned(to, size)) return kInvalidValue;
  stream->add([=] { std::memcpy(to, source->bytes + (from - source->device_address), size); });
  return kOk;
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t size, Stream* stream) {
  if (Result result = ready()) return result;
  auto target = allocation_of(to, size), source = allocation_of(from, size);
  if (target && source && target->device != source->device) return kInvalidValue;  // cuMemcpyPeerAsync's work
  return copy(target, to, source, from, size, stream);
}
Result cuMemcpyPeerAsync(Pointer to, Context* there, Pointer from, Context* here, size_t size, Stream* stream) {
  if (Result result = ready()) return result;
  auto target = allocation_of(to, size), source = allocation_of(from, size);
  if (target && source && (target->device != there->device || source->device != here->device)) return kInvalidValue;
  return copy(target, to, source, from, size, stream);
}

// Whatever lies where, pageable or not, at once.
Result cuMemcpy(Pointer to, Pointer from, size_t size) {
  if (Result result = ready()) return result;
  auto where = [&](Pointer at) -> void* {
    auto found = allocation_of(at, size);
    return found ? found->bytes + (at - found->device_address) : reinterpret_cast<void*>(at);
  };
  return std::memmove(where(to), where(from), size), kOk;
}
Result cuCtxSetCurrent(Context* context) { return current.assign(1, context), kOk; }
Result cuCtxSynchronize() { return ready(); }

Result cuStreamCreate(Stream** stream, unsigned) {
  if (Result result = ready()) return result;
  *stream = new Stream(current.back()->device);
  return num_streams++, kOk;
}
Result cuStreamSynchronize(Stream* stream) {
  if (Result result = ready()) return result;
  return (stream ? *stream : default_stream()).synchronize(), kOk;
}
Result cuStreamDestroy_v2(Stream* stream) {
  delete stream;
  return num_streams--, kOk;
}
Result cuEventCreate(Event** event, unsigned) { return *event = new Event, num_events++, ready(); }
Result cuEventRecord(Event* event, Stream* stream) {
  if (Result result = ready()) return result;
  uint64_t number;
  {
    std::lock_guard lock(event->mutex);
    number = ++event->recorded;
  }
  stream->add([=] {
    std::lock_guard lock(event->mutex);
    event->reached = number;
    event->changed.notify_all();
  });
  return kOk;
}
Result cuEventSynchronize(Event* event) {
  std::unique_lock lock(event->mutex);
  event->changed.wait(lock, [&] { return event->reached == event->recorded; });
  return kOk;
}
Result cuEventDestroy_v2(Event* event) {
  delete event;
  return num_events--, kOk;
}

Result cuIpcGetMemHandle(IpcHandle* handle, Pointer at) {
  if (Result result = ready()) return result;
  auto found = allocation_of(at, 1);
  if (!found || found->opened) return kInvalidValue;
  IpcContents contents{kMagic, found->size, getpid(), found->fd, found->device};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &contents, sizeof contents);
  return kOk;
}
Result cuIpcOpenMemHandle_v2(Pointer* address, IpcHandle handle, unsigned) {
  if (Result result = ready()) return result;
  IpcContents contents;
  std::memcpy(&contents, &handle, sizeof contents);
  if (contents.magic != kMagic) return kInvalidValue;
  if (contents.pid == getpid()) return kInvalidContext;  // as the real one: not in the exporting process
  {
    std::lock_guard lock(mutex);
    for (auto& [at, known] : allocations)
      if (known->opened && std::memcmp(&known->handle, &handle, sizeof handle) == 0)
        return known->opened++, *address = at, kOk;
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", contents.pid, contents.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  auto made = map(fd, contents.size, contents.device);
  if (!made) return kOutOfMemory;
  made->handle = handle;
  made->opened = 1;
  return *address = made->device_address, kOk;
}
Result cuIpcCloseMemHandle(Pointer address) {
  if (Result result = ready()) return result;
  std::lock_guard lock(mutex);
  auto found = allocations.find(address);
  if (found == allocations.end() || !found->second->opened) return kInvalidValue;
  if (--found->second->opened == 0) allocations.erase(found);
  return kOk;
}

Result cuMemGetHandleForAddressRange(void* fd, Pointer at, size_t size, int, unsigned long long) {
  if (Result result = ready()) return result;
  auto found = allocation_of(at, 1);
  bool is_aligned = at % 4096 == 0 && size % 4096 == 0;
  if (!found || !is_aligned || at + size > found->device_address + found->mapped) return kInvalidValue;
  return *static_cast<int*>(fd) = dup(found->fd), kOk;
}

// Not of the real driver: what is held at the moment, for tests that look for leaks.
void double_counts(int* own, int* opened, int* num_pinned, int* streams) {
  std::lock_guard lock(mutex);
  *own = *opened = 0;
  for (auto& [at, allocation] : allocations) ++*(allocation->opened ? opened : own);
  *num_pinned = static_cast<int>(pinned.size());
  *streams = num_streams;
}

}  // extern "C"
