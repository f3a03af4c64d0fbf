// SPDX-License-Identifier: Apache-2.0
#include "frame_task.h"

#include <algorithm>

namespace mooncake {

void Gates::add(uint64_t lane, std::shared_ptr<Gate> gate) {
  std::lock_guard lock(mutex_);
  by_lane_.insert_or_assign(lane, std::move(gate));
}

// A lane that still writes to a medium keeps its name until that has ended.
void Gates::remove(uint64_t lane, const std::shared_ptr<Gate>& gate) {
  std::lock_guard lock(mutex_);
  {
    std::lock_guard held(gate->mutex);
    gate->is_gone = true;
    if (gate->num_under_way > 0) return;
  }
  auto found = by_lane_.find(lane);
  if (found != by_lane_.end() && found->second == gate) by_lane_.erase(found);
}

void Gates::cut(uint64_t lane, const std::shared_ptr<FrameTask>& task) {
  std::shared_ptr<Gate> gate;
  {
    std::lock_guard lock(mutex_);
    auto found = by_lane_.find(lane);
    if (found == by_lane_.end()) return;  // its connection has ended
    gate = found->second;
  }
  std::lock_guard lock(gate->mutex);
  gate->is_cut = true;
  if (gate->num_under_way == 0) return;
  task->add_step();
  gate->waiting.push_back(task);
}

void Gates::ended(uint64_t lane, const std::shared_ptr<Gate>& gate) {
  std::vector<std::shared_ptr<FrameTask>> waiting;
  bool is_gone;
  {
    std::lock_guard lock(gate->mutex);
    if (--gate->num_under_way > 0) return;
    waiting.swap(gate->waiting);
    is_gone = gate->is_gone;
  }
  for (auto& task : waiting) task->end_step({}, 0);
  if (is_gone) remove(lane, gate);
}

bool FrameTask::plan(std::span<const wire::WireSlice> slices, const std::vector<RegionRef>& regions,
                     uint32_t& failed_slice) {
  uint64_t placed = 0;
  touched = regions;
  for (uint32_t i = 0; i < slices.size(); i++) {
    const wire::WireSlice& slice = slices[i];
    auto region = std::find_if(regions.begin(), regions.end(), [&](auto& region) { return region->key == slice.key; });
    placed += slice.length;
    if (!(*region)->medium) continue;
    uint64_t offset = slice.address - (*region)->address;
    if (layout_.add(*region, offset, slice.length, i, 0, kMaxChunks) < slice.length) return failed_slice = i, false;
    // A move ends where its last byte is in the payload; a slice may end one and begin others.
    uint64_t end = placed;
    ends_.resize(layout_.moves.size());
    uint64_t left = slice.length;
    for (size_t move = layout_.moves.size(); move > 0 && left > 0; move--) {
      ends_[move - 1] = end;
      uint64_t mine = std::min(left, layout_.moves[move - 1].length);
      end -= mine, left -= mine;
    }
  }
  return true;
}

void FrameTask::take(Staging::Lease given, std::span<const wire::WireSlice> slices) {
  lease = std::move(given);
  size_t piece = 0;
  for (uint32_t i = 0; i < slices.size(); i++) {
    if (piece == layout_.pieces.size() || layout_.pieces[piece].slice != i) {
      payload.add(reinterpret_cast<void*>(slices[i].address), slices[i].length);
      continue;
    }
    for (; piece < layout_.pieces.size() && layout_.pieces[piece].slice == i; piece++)
      payload.add(lease.chunk(layout_.pieces[piece].chunk) + layout_.pieces[piece].at, layout_.pieces[piece].length);
  }
}

bool FrameTask::start(uint64_t num_bytes, uint64_t lane, const std::shared_ptr<Gates>& gates,
                      const std::shared_ptr<Gates::Gate>& gate) {
  Op op = request.kind == wire::Kind::kWrite ? Op::kWrite : Op::kRead;
  for (; num_started_ < ends_.size() && ends_[num_started_] <= num_bytes; num_started_++) {
    const Layout::Move& move = layout_.moves[num_started_];
    if (op == Op::kWrite) {
      std::lock_guard open(gate->mutex);
      if (gate->is_cut) return false;
      gate->num_under_way++;
    }
    add_step();
    auto done = [self = shared_from_this(), op, lane, gates, gate, slice = move.slice](Outcome outcome) {
      if (op == Op::kWrite) gates->ended(lane, gate);
      self->end_step(outcome, slice);
    };
    if (!move.region->enter()) {
      done({Status::kAccessDenied});
      continue;
    }
    move.region->medium->start(op, move.offset, lease.chunk(move.chunk) + move.at, move.length,
                               [region = move.region, done = std::move(done)](Outcome outcome) {
                                 region->leave();
                                 done(outcome);
                               });
  }
  return true;
}

void FrameTask::add_step() { num_left_.fetch_add(1, std::memory_order_relaxed); }

void FrameTask::end_step(Outcome outcome, size_t slice) {
  if (outcome.status != Status::kOk) {
    std::lock_guard lock(mutex_);
    if (outcome_.status == Status::kOk) outcome_ = outcome, failed_slice_ = slice;
  }
  auto notify = notify_;  // after the last step the loop may drop this task
  if (num_left_.fetch_sub(1, std::memory_order_acq_rel) == 1 && notify) notify();
}

}  // namespace mooncake
