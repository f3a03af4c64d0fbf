// SPDX-License-Identifier: Apache-2.0
#include "shared_file.h"

#include <algorithm>
#include <cstring>
#include <system_error>

namespace mooncake {

namespace {

// How the owner opened it, and so shall we.
struct Opened {
  int32_t depth = 1;
  bool is_writable = false, direct = false, ring = false;
};
static_assert(sizeof(Opened) <= sizeof(SharingMessage::shown));

constexpr int kMaxDepth = 1024;

}  // namespace

SharingPeer::Mapping SharedFilePeer::map(const SharingMessage& message, int descriptor) {
  Mapping mapping;
  mapping.status = Status::kPeerLost;  // this path does not lead there; another may
  if (descriptor < 0) return mapping;
  Opened opened;
  std::memcpy(&opened, message.shown, sizeof opened);
  FileMedium::Options options{opened.is_writable, opened.direct, opened.ring, std::clamp(opened.depth, 1, kMaxDepth)};
  try {
    auto file = std::make_shared<FileMedium>(descriptor, message.size, options);
    mapping.region =
        std::make_shared<Region>(message.base, message.size, message.key, opened.is_writable, "file", std::move(file));
  } catch (const std::system_error&) {  // it is not what it claims to be, or not to be had here
  }
  return mapping;
}

Completion SharedFilePeer::execute(Job& job) {
  const auto& slices = job.request.slices;
  std::vector<RegionRef> files(slices.size());
  Mapping mapping;
  uint64_t key = 0;
  for (size_t i = 0; i < slices.size(); i++) {
    if (slices[i].length == 0) continue;
    if (!mapping.region || key != job.keys[i]) {
      Status status = find(job.keys[i], job.request.deadline, &job.stop, mapping);
      if (status != Status::kOk) return job.failed(status, static_cast<int64_t>(i));
      key = job.keys[i];
    }
    const Region& file = *mapping.region;
    bool is_allowed =
        file.contains(slices[i].remote, slices[i].length) && (file.is_writable || job.request.op == Op::kRead);
    if (!is_allowed) return job.failed(Status::kAccessDenied, static_cast<int64_t>(i));
    files[i] = mapping.region;
  }
  return carry_files(job, std::move(files));
}

bool SharedFileTransport::show(const Region& region, SharingMessage& answer, int& descriptor) {
  const auto* file = dynamic_cast<const FileMedium*>(region.medium.get());
  if (!file) return false;
  const FileMedium::Options& options = file->options();
  Opened opened{options.depth, options.is_writable, options.direct, options.ring};
  std::memcpy(answer.shown, &opened, sizeof opened);
  descriptor = file->descriptor();
  return true;
}

std::shared_ptr<SharingPeer> SharedFileTransport::make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) {
  return std::make_shared<SharedFilePeer>(regions_, std::move(remote), std::move(socket));
}

}  // namespace mooncake
