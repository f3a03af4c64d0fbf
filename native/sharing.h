// SPDX-License-Identifier: Apache-2.0
// Regions shown to other processes of this host. A SOCK_SEQPACKET connection over an abstract Unix socket
// stands for the relationship. Showing a region's key gets what is needed to map it here; closing the
// region revokes it and waits until the peers say that they have stopped; a peer that died is seen by the
// connection's end. One thread per transport reads all connections, in both roles. What is shown, and
// how it is mapped and moved, is the business of the transports derived from these (shm.h, cuda_ipc.h,
// shared_file.h).
//
//     client                       owner
//     Hello{epoch}            ──▶           both check that the other runs as the same user
//                             ◀──  Welcome
//     Get{key}                ──▶
//                             ◀──  Give{base, size, shown} (+ descriptor), or Give{denied}
//                             ◀──  Revoke{key}
//     Revoked{key}            ──▶
#pragma once

#include <sys/types.h>

#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "transport.h"

namespace mooncake {

struct SharingMessage {
  enum class Kind : uint8_t { kHello = 1, kWelcome, kGet, kGive, kRevoke, kRevoked };
  static constexpr uint32_t kMagic = 0x534b4f4d;  // "MOKS"
  static constexpr uint8_t kVersion = 2;
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  Kind kind = Kind::kHello;
  uint16_t status = 0;
  uint64_t epoch = 0;
  uint64_t key = 0;
  uint64_t base = 0;  // of the region in its owner
  uint64_t size = 0;
  uint8_t shown[112] = {};  // what mapping it needs beside a descriptor
};

// A socket that two may hold; closed when the second lets go.
struct SharingSocket {
  explicit SharingSocket(int fd) : fd(fd) { leave_to_parent(fd); }
  ~SharingSocket();
  const int fd;
  bool send(const SharingMessage& message, int descriptor = -1) const;  // false: the peer is gone or hangs
  // 1: a message (and perhaps a descriptor), 0: none there, -1: over or nonsense
  int receive(SharingMessage& message, int& descriptor) const;
};
using SharingSocketRef = std::shared_ptr<SharingSocket>;

// A process whose regions are mapped here as they are needed.
class SharingPeer : public Peer {
 public:
  SharingPeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, SharingSocketRef socket,
              int max_workers = 1);
  ~SharingPeer() override;
  bool is_lost() const override { return lost_; }

  // From the transport's thread:
  void given(const SharingMessage& message, int descriptor);
  void revoked(uint64_t key);
  void lost();

 protected:
  struct Mapping {
    bool is_answered = false;
    Status status = Status::kAccessDenied;  // when there is no region: denied, revoked, or not to be mapped here
    RegionRef region{};
    uint64_t base = 0;                                          // of the region in its owner
    std::shared_ptr<std::vector<std::atomic<bool>>> touched{};  // of shared memory: parts that have pages
    // Where the peer's `address` is here; false when it lies outside.
    bool locate(uint64_t address, uint64_t length, uint64_t& here) const;
  };

  // The region as it is mapped here, or none and a status. Owns the descriptor (-1: none came).
  virtual Mapping map(const SharingMessage& message, int descriptor) = 0;

  Status find(uint64_t key, Clock::time_point deadline, const std::atomic<Status>* stop, Mapping& found);
  void wake() override { answered_.notify_all(); }
  void release() override { mappings_.clear(); }

 private:
  const SharingSocketRef socket_;
  std::atomic<bool> lost_{false};
  std::unordered_map<uint64_t, Mapping> mappings_;
  std::condition_variable answered_;
};

// A peer whose mapped regions are memory, which a subclass copies portion by portion.
class CopyingPeer : public SharingPeer {
 public:
  using SharingPeer::SharingPeer;

 protected:
  // What is copied between two looks at stop and deadline: slices between one local region and one
  // mapping, with addresses of this process on both sides. Empty slices lie anywhere.
  struct Portion {
    const Request& request;
    uint64_t job_bytes = 0;
    std::vector<RegionRef> regions{};  // local, mapped
    uint64_t key = 0;                  // of the mapped one
    Mapping mapping{};
    std::vector<Slice> slices{};
    uint32_t* checksums = nullptr;  // of these slices, each to be continued; null: not requested
  };

  // Copies a portion, whose regions are open meanwhile.
  virtual Outcome copy(const Portion& portion) = 0;
  virtual uint64_t portion_bytes() const = 0;

  Completion execute(Job& job) final;

 private:
  Status gather(Job& job, size_t& next, uint64_t& offset, Portion& portion);
  Status may_go_on(const Job& job, bool has_begun) const;
};

class SharingTransport : public RegionListener {
 public:
  // Throws std::system_error when no socket can be had. Constructors of derived classes call start() and
  // their destructors close(), because the thread calls what they override.
  // An empty `endpoint` takes a new name.
  SharingTransport(std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::string& endpoint = "");
  ~SharingTransport() override;

  const std::string& endpoint() const { return name_; }
  // Null and a status when there is no such peer, it is another process by now, it does not answer, or this
  // transport was closed.
  std::shared_ptr<SharingPeer> connect(const std::string& endpoint, uint64_t epoch, std::vector<RemoteRegion> remote,
                                       Clock::time_point deadline, Status& status);
  void region_closed(const Region& region) override;
  void close();

 protected:
  void start();
  // Fills in what a peer needs to map `region`; false when this transport does not show it.
  virtual bool show(const Region& region, SharingMessage& answer, int& descriptor) = 0;
  virtual std::shared_ptr<SharingPeer> make_peer(std::vector<RemoteRegion> remote, SharingSocketRef socket) = 0;

  const std::shared_ptr<RegionTable> regions_;

 private:
  struct Link {
    SharingSocketRef socket;
    bool is_outbound = false;
    bool is_greeted = false;
    Clock::time_point since = Clock::now();
    std::weak_ptr<SharingPeer> peer{};         // outbound
    std::unordered_set<uint64_t> given{};      // inbound: keys of the regions it has mapped
    std::unordered_set<uint64_t> unrevoked{};  // revoked, not yet confirmed
  };

  void serve();
  bool watch(std::unique_ptr<Link> link);
  void close_descriptors();
  void accept_one();
  void drop_ungreeted();
  bool handle(Link& link);  // false: the link is over
  bool serve_request(Link& link, const SharingMessage& message);
  void drop(Link* link);

  const uint64_t epoch_;
  std::string name_;
  int listener_ = -1, epoll_ = -1, wakeup_ = -1;
  size_t num_ungreeted_ = 0;  // links not greeted yet; the thread's own
  std::mutex mutex_;
  std::condition_variable revoked_;
  std::unordered_map<int, std::unique_ptr<Link>> links_;
  std::atomic<bool> closing_{false};
  std::unique_ptr<std::thread> thread_;
  OwnProcess own_process_;
};

}  // namespace mooncake
