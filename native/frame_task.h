// SPDX-License-Identifier: Apache-2.0
// The work that must end before the server answers a frame: moves between staging and a medium, or writes
// of lanes that were cut. The event loop starts a task and goes on with others; the end of its last step
// notifies the loop. A task owns all that its steps touch, so a connection may end before it.
//
//     lane ──frame──▶ task: move, move, move ──▶ medium
//          ◀─reply──  when num_left is 0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "extents.h"
#include "region.h"
#include "wire.h"

namespace mooncake {

class FrameTask;

// The connections of a server by lane. Memory is written only with the connection's own gate held, and
// what is on its way to a medium is counted there, so a cut knows when the last byte of a lane has landed.
class Gates : public std::enable_shared_from_this<Gates> {
 public:
  struct Gate {
    std::mutex mutex;
    bool is_cut = false;
    bool is_gone = false;      // its connection has ended
    size_t num_under_way = 0;  // writes of media
    std::vector<std::shared_ptr<FrameTask>> waiting{};
  };
  void add(uint64_t lane, std::shared_ptr<Gate> gate);
  void remove(uint64_t lane, const std::shared_ptr<Gate>& gate);
  // From now on nothing of the lane begins to land; a step of `task` ends when the last of it has landed.
  void cut(uint64_t lane, const std::shared_ptr<FrameTask>& task);
  void ended(uint64_t lane, const std::shared_ptr<Gate>& gate);  // a write of a medium

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Gate>> by_lane_;
};

class FrameTask : public std::enable_shared_from_this<FrameTask> {
 public:
  // The most staging that one frame may take: its slices in media must fit.
  static constexpr size_t kMaxChunks = 64;

  FrameTask(const wire::Frame& request, std::function<void()> notify) : request(request), notify_(std::move(notify)) {}

  const wire::Frame request;
  std::vector<RegionRef> touched{};
  Staging::Lease lease{};
  Extents payload{};  // in the order of the frame: memory, and staging for what lies in media

  // Finds places for slices in media; false, and which: they are too many for one frame.
  bool plan(std::span<const wire::WireSlice> slices, const std::vector<RegionRef>& regions, uint32_t& failed_slice);
  size_t num_chunks() const { return layout_.num_chunks(); }
  void take(Staging::Lease given, std::span<const wire::WireSlice> slices);

  // Starts the moves whose bytes are among the first `num_bytes` of the payload. False: the lane was cut.
  bool start(uint64_t num_bytes, uint64_t lane, const std::shared_ptr<Gates>& gates,
             const std::shared_ptr<Gates::Gate>& gate);
  void add_step();
  void end_step(Outcome outcome, size_t slice);
  void seal() { end_step({}, 0); }  // no more steps will be added

  bool is_done() const { return num_left_.load(std::memory_order_acquire) == 0; }
  const Outcome& outcome() const { return outcome_; }  // when done
  size_t failed_slice() const { return failed_slice_; }

 private:
  const std::function<void()> notify_;
  Layout layout_;
  std::vector<uint64_t> ends_;  // of each move, within the payload
  size_t num_started_ = 0;
  std::mutex mutex_;
  Outcome outcome_;
  size_t failed_slice_ = 0;
  std::atomic<size_t> num_left_{1};
};

}  // namespace mooncake
