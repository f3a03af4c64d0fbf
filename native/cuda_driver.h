// SPDX-License-Identifier: Apache-2.0
// The CUDA driver as far as we use it: libcuda.so.1, opened when a process first touches device memory
// and never linked, so that one build runs on machines with and without a GPU. The declarations are our
// own, of the driver's stable binary interface (the versioned names that every driver since 11.2
// exports). Nothing here decides anything; cuda.h does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace mooncake::cuda {

using Result = int;
using Device = int;
using Context = struct OpaqueContext*;
using Stream = struct OpaqueStream*;
using Event = struct OpaqueEvent*;
using Pointer = unsigned long long;  // an address in device memory

struct IpcHandle {
  char bytes[64];
};

constexpr Result kSuccess = 0, kOutOfMemory = 2;
constexpr int kOldestDriver = 11020;

// Numbers of the driver's interface.
constexpr int kAttributeDmaBuf = 124;
constexpr int kPointerMemoryType = 2, kPointerSyncMemops = 6, kPointerDevice = 9;
constexpr unsigned kTypeHost = 1, kTypeDevice = 2;
constexpr unsigned kStreamNonBlocking = 1, kEventNoTiming = 2, kHostPortable = 1, kIpcLazyPeerAccess = 1;
constexpr int kDmaBufFd = 1;

struct Driver {
  // The driver in the library file `path`, initialised; one per path and process. Null and `why` when
  // there is no such library, no device, or it is too old.
  static std::shared_ptr<const Driver> open(const std::string& path, std::string& why);
  static void* load(const std::string& path, std::string& why);  // the library alone, by dlopen()
  std::string say(Result result) const;                          // "CUDA_ERROR_INVALID_VALUE: invalid argument"

  int version = 0, num_devices = 0;

  Result (*init)(unsigned);
  Result (*driver_version)(int*);
  Result (*error_name)(Result, const char**);
  Result (*error_string)(Result, const char**);
  Result (*device_count)(int*);
  Result (*device_get)(Device*, int);
  Result (*device_name)(char*, int, Device);
  Result (*device_attribute)(int*, int, Device);
  Result (*device_bus_id)(char*, int, Device);
  Result (*device_memory)(size_t*, Device);
  Result (*device_can_access)(int*, Device, Device);
  Result (*context_retain)(Context*, Device);
  Result (*context_push)(Context);
  Result (*context_pop)(Context*);
  Result (*enable_peer_access)(Context, unsigned);
  Result (*pointer_attribute)(void*, int, Pointer);
  Result (*set_pointer_attribute)(const void*, int, Pointer);
  Result (*address_range)(Pointer*, size_t*, Pointer);
  Result (*allocate)(Pointer*, size_t);
  Result (*free)(Pointer);
  Result (*fill)(Pointer, unsigned char, size_t);
  Result (*host_allocate)(void**, size_t, unsigned);
  Result (*host_free)(void*);
  Result (*host_register)(void*, size_t, unsigned);
  Result (*host_unregister)(void*);
  Result (*copy_in)(Pointer, const void*, size_t, Stream);  // host to device
  Result (*copy_out)(void*, Pointer, size_t, Stream);       // device to host
  Result (*copy_within)(Pointer, Pointer, size_t, Stream);  // on one device
  Result (*copy_across)(Pointer, Context, Pointer, Context, size_t, Stream);
  Result (*stream_create)(Stream*, unsigned);
  Result (*stream_synchronize)(Stream);
  Result (*stream_destroy)(Stream);
  Result (*event_create)(Event*, unsigned);
  Result (*event_record)(Event, Stream);
  Result (*event_synchronize)(Event);
  Result (*event_destroy)(Event);
  Result (*ipc_export)(IpcHandle*, Pointer);
  Result (*ipc_open)(Pointer*, IpcHandle, unsigned);
  Result (*ipc_close)(Pointer);
  Result (*handle_for_range)(void*, Pointer, size_t, int, unsigned long long);  // null before 11.7
};

}  // namespace mooncake::cuda
