// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

namespace mooncake::cuda {

namespace {

bool look_up(void* library, Driver& d, std::string& why) {
  d.handle_for_range = reinterpret_cast<decltype(d.handle_for_range)>(dlsym(library, "cuMemGetHandleForAddressRange"));
  const std::pair<const char*, void*> wanted[] = {
      {"cuInit", &d.init},
      {"cuDriverGetVersion", &d.driver_version},
      {"cuGetErrorName", &d.error_name},
      {"cuGetErrorString", &d.error_string},
      {"cuDeviceGetCount", &d.device_count},
      {"cuDeviceGet", &d.device_get},
      {"cuDeviceGetName", &d.device_name},
      {"cuDeviceGetAttribute", &d.device_attribute},
      {"cuDeviceGetPCIBusId", &d.device_bus_id},
      {"cuDeviceTotalMem_v2", &d.device_memory},
      {"cuDeviceCanAccessPeer", &d.device_can_access},
      {"cuDevicePrimaryCtxRetain", &d.context_retain},
      {"cuCtxPushCurrent_v2", &d.context_push},
      {"cuCtxPopCurrent_v2", &d.context_pop},
      {"cuCtxEnablePeerAccess", &d.enable_peer_access},
      {"cuPointerGetAttribute", &d.pointer_attribute},
      {"cuPointerSetAttribute", &d.set_pointer_attribute},
      {"cuMemGetAddressRange_v2", &d.address_range},
      {"cuMemAlloc_v2", &d.allocate},
      {"cuMemFree_v2", &d.free},
      {"cuMemsetD8_v2", &d.fill},
      {"cuMemHostAlloc", &d.host_allocate},
      {"cuMemFreeHost", &d.host_free},
      {"cuMemHostRegister_v2", &d.host_register},
      {"cuMemHostUnregister", &d.host_unregister},
      {"cuMemcpyHtoDAsync_v2", &d.copy_in},
      {"cuMemcpyDtoHAsync_v2", &d.copy_out},
      {"cuMemcpyDtoDAsync_v2", &d.copy_within},
      {"cuMemcpyPeerAsync", &d.copy_across},
      {"cuStreamCreate", &d.stream_create},
      {"cuStreamSynchronize", &d.stream_synchronize},
      {"cuStreamDestroy_v2", &d.stream_destroy},
      {"cuEventCreate", &d.event_create},
      {"cuEventRecord", &d.event_record},
      {"cuEventSynchronize", &d.event_synchronize},
      {"cuEventDestroy_v2", &d.event_destroy},
      {"cuIpcGetMemHandle", &d.ipc_export},
      {"cuIpcOpenMemHandle_v2", &d.ipc_open},
      {"cuIpcCloseMemHandle", &d.ipc_close},
  };
  for (auto [name, slot] : wanted) {
    void* function = dlsym(library, name);
    if (!function) return why = std::string("it has no ") + name + "; install a driver of CUDA 11.2 or newer", false;
    std::memcpy(slot, &function, sizeof function);
  }
  return true;
}

bool start(Driver& d, std::string& why) {
  if (Result result = d.init(0); result != kSuccess) return why = d.say(result), false;
  if (d.driver_version(&d.version) != kSuccess || d.version < kOldestDriver) {
    why = "the driver supports CUDA " + std::to_string(d.version / 1000) + "." + std::to_string(d.version % 1000 / 10) +
          "; install one of 11.2 or newer";
    return false;
  }
  if (Result result = d.device_count(&d.num_devices); result != kSuccess) return why = d.say(result), false;
  if (d.num_devices == 0) why = "no device is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES";
  return d.num_devices > 0;
}

}  // namespace

void* Driver::load(const std::string& path, std::string& why) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library) return library;
  const char* said = dlerror();
  why = std::string(said ? said : path.c_str()) + "; install the NVIDIA driver, or set cuda_library to where it is";
  return nullptr;
}

std::shared_ptr<const Driver> Driver::open(const std::string& path, std::string& why) {
  static std::mutex mutex;
  static auto& opened = *new std::map<std::string, std::shared_ptr<const Driver>>;  // a driver is not unloaded
  std::lock_guard lock(mutex);
  if (auto found = opened.find(path); found != opened.end()) return found->second;
  void* library = load(path, why);
  if (!library) return nullptr;
  auto driver = std::make_shared<Driver>();
  if (!look_up(library, *driver, why) || !start(*driver, why)) {
    why = path + ": " + why;
    return nullptr;
  }
  return opened[path] = driver;
}

std::string Driver::say(Result result) const {
  const char *name = nullptr, *text = nullptr;
  if (error_name(result, &name) != kSuccess || !name) return "CUDA error " + std::to_string(result);
  if (error_string(result, &text) != kSuccess || !text) return name;
  return std::string(name) + ": " + text;
}

}  // namespace mooncake::cuda
