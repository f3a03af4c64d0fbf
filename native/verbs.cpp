// SPDX-License-Identifier: Apache-2.0
#include "verbs.h"

#include <dlfcn.h>

#include <type_traits>

namespace mooncake::verbs {

namespace {

struct Loaded {
  Library table{};
  std::string error;

  Loaded() {
    void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed: its drivers hold on to it
    if (!library) {
      error = dlerror();
      return;
    }
    auto find = [&](auto& function, const char* name, bool is_needed = true) {
      void* found = dlsym(library, name);
      if (!found && is_needed && error.empty()) error = std::string("libibverbs.so.1 has no ") + name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(table.get_device_list, "ibv_get_device_list");
    find(table.free_device_list, "ibv_free_device_list");
    find(table.get_device_name, "ibv_get_device_name");
    find(table.open_device, "ibv_open_device");
    find(table.close_device, "ibv_close_device");
    find(table.query_device, "ibv_query_device");
    find(table.query_port, "ibv_query_port");
    find(table.query_gid, "ibv_query_gid");
    find(table.alloc_pd, "ibv_alloc_pd");
    find(table.dealloc_pd, "ibv_dealloc_pd");
    find(table.reg_mr, "ibv_reg_mr");
    find(table.dereg_mr, "ibv_dereg_mr");
    find(table.create_comp_channel, "ibv_create_comp_channel");
    find(table.destroy_comp_channel, "ibv_destroy_comp_channel");
    find(table.create_cq, "ibv_create_cq");
    find(table.destroy_cq, "ibv_destroy_cq");
    find(table.get_cq_event, "ibv_get_cq_event");
    find(table.ack_cq_events, "ibv_ack_cq_events");
    find(table.create_qp, "ibv_create_qp");
    find(table.modify_qp, "ibv_modify_qp");
    find(table.destroy_qp, "ibv_destroy_qp");
    find(table.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", false);
  }
};

}  // namespace

const Library* load(std::string& error) {
  static const Loaded loaded;
  error = loaded.error;
  return loaded.error.empty() ? &loaded.table : nullptr;
}

}  // namespace mooncake::verbs
