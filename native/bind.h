// SPDX-License-Identifier: Apache-2.0
// What the parts of the Python surface have in common.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "transport.h"

namespace mooncake {

using RemoteTuple = std::tuple<uint64_t, uint64_t, uint64_t, bool>;  // address, size_bytes, key, is_writable

inline std::vector<RemoteRegion> remote_of(const std::vector<RemoteTuple>& tuples) {
  std::vector<RemoteRegion> regions;
  for (auto& [address, size, key, is_writable] : tuples) regions.push_back({address, size, key, is_writable});
  return regions;
}

// Other Python threads run while it lives. When the interpreter ends meanwhile, CPython ends a daemon thread
// that wants its lock back by unwinding its stack, which C++ answers with terminate(); we wait instead for
// the process to end (as CPython itself does from 3.14 on).
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

void bind_rdma(nanobind::module_& m);  // bind_rdma.cpp

}  // namespace mooncake
