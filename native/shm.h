// Reads and writes on the same host: the peer's shared memory is mapped here and copied by the
// caller's own thread, so the target process does nothing at all.
//
// A SOCK_SEQPACKET connection over an abstract Unix socket stands for the relationship. Showing a
// region's key gets its file descriptor; closing the region revokes it and waits until the peers say
// that they have stopped; a peer that died is seen by the connection's end. One thread per transport
// reads all connections, in both roles.
//
//     client                       owner
//     Hello{epoch}            ──▶           both check that the other runs as the same user
//                             ◀──  Welcome
//     Get{key}                ──▶
//                             ◀──  Give{base, size} + descriptor, or Give{denied}
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

struct ShmMessage {
  enum class Kind : uint8_t { kHello = 1, kWelcome, kGet, kGive, kRevoke, kRevoked };
  static constexpr uint32_t kMagic = 0x534b4f4d;  // "MOKS"
  uint32_t magic = kMagic;
  uint8_t version = 1;
  Kind kind = Kind::kHello;
  uint16_t status = 0;
  uint64_t epoch = 0;
  uint64_t key = 0;
  uint64_t base = 0;  // of the region in its owner
  uint64_t size = 0;
};

// A socket that two may hold; closed when the second lets go.
struct ShmSocket {
  explicit ShmSocket(int fd) : fd(fd) {}
  ~ShmSocket();
  const int fd;
  bool send(const ShmMessage& message, int descriptor = -1) const;  // false: the peer is gone or hangs
  // 1: a message (and perhaps a descriptor), 0: none there, -1: over or nonsense
  int receive(ShmMessage& message, int& descriptor) const;
};
using ShmSocketRef = std::shared_ptr<ShmSocket>;

class ShmPeer final : public Peer {
 public:
  ShmPeer(std::shared_ptr<RegionTable> local, std::vector<RemoteRegion> remote, ShmSocketRef socket);
  ~ShmPeer() override;
  bool is_lost() const override { return lost_; }

  // The mapping behind [address, address + length) of the peer and where it starts here, or null.
  RegionRef view(uint64_t address, uint64_t length, Clock::time_point deadline, uint64_t& here);

  // From the transport's thread:
  void given(const ShmMessage& message, int descriptor);
  void revoked(uint64_t key);
  void lost();

 protected:
  Completion execute(Job& job) override;
  void wake() override { answered_.notify_all(); }
  void release() override { mappings_.clear(); }

 private:
  struct Mapping {
    bool is_answered = false;
    RegionRef region{};  // null: denied or revoked
    uint64_t base = 0;
    std::shared_ptr<std::vector<std::atomic<bool>>> faulted_in{};  // per kFaultIn bytes
    void fault_in(uint64_t here, uint64_t length) const;
  };
  Status find(uint64_t key, Clock::time_point deadline, const std::atomic<Status>* stop, Mapping& found);

  const ShmSocketRef socket_;
  std::atomic<bool> lost_{false};
  std::unordered_map<uint64_t, Mapping> mappings_;
  std::condition_variable answered_;
};

class ShmTransport final : public RegionListener {
 public:
  // Throws std::system_error when no socket can be had.
  ShmTransport(std::shared_ptr<RegionTable> regions, uint64_t epoch);
  ~ShmTransport() override;

  const std::string& endpoint() const { return name_; }
  // Null and a status when there is no such peer, it is another process by now, or it does not answer.
  std::shared_ptr<ShmPeer> connect(const std::string& endpoint, uint64_t epoch, std::vector<RemoteRegion> remote,
                                   Clock::time_point deadline, Status& status);
  void region_closed(const Region& region) override;
  void close();

 private:
  struct Link {
    ShmSocketRef socket;
    bool is_outbound = false;
    bool is_greeted = false;
    std::weak_ptr<ShmPeer> peer{};             // outbound
    std::unordered_set<uint64_t> given{};      // inbound: keys of the regions it has mapped
    std::unordered_set<uint64_t> unrevoked{};  // asked back, not yet confirmed
  };

  void serve();
  void watch(std::unique_ptr<Link> link);
  void accept_one();
  bool handle(Link& link);  // false: the link is over
  bool serve_request(Link& link, const ShmMessage& message);
  void drop(Link* link);

  const std::shared_ptr<RegionTable> regions_;
  const uint64_t epoch_;
  std::string name_;
  int listener_ = -1, epoll_ = -1, wakeup_ = -1;
  std::mutex mutex_;
  std::condition_variable revoked_;
  std::unordered_map<int, std::unique_ptr<Link>> links_;
  std::atomic<bool> closing_{false};
  std::unique_ptr<std::thread> thread_;
  OwnProcess own_process_;
};

}  // namespace mooncake
