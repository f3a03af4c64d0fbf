// SPDX-License-Identifier: Apache-2.0
// One connection's bytes, plain or encrypted, behind the two calls that both kinds need: take what has
// arrived, hand over what fits. Neither waits. The plain kind is the system call itself behind one
// branch, so it costs what it cost before there was another.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "own_process.h"
#include "tls.h"

namespace mooncake {

class Channel {
 public:
  explicit Channel(int socket, std::unique_ptr<TlsSession> tls = nullptr) : socket_(socket), tls_(std::move(tls)) {
    leave_to_parent(socket_);
  }
  ~Channel() {
    tls_.reset();
    if (socket_ >= 0) close_own(socket_);
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int socket() const { return socket_; }
  TlsSession* tls() const { return tls_.get(); }
  void encrypt(std::unique_ptr<TlsSession> session) { tls_ = std::move(session); }  // before anything else moved

  // Bytes placed, 0 at the end, or -1: errno is EAGAIN when nothing (more) is there yet. `drained` becomes
  // true when everything that had arrived was taken.
  ssize_t receive(const std::vector<iovec>& parts, size_t room, bool& drained) {
    if (tls_) return tls_->receive(parts.data(), parts.size(), drained);
    ssize_t count = readv(socket_, parts.data(), static_cast<int>(parts.size()));
    drained = count < static_cast<ssize_t>(room);
    return count;
  }
  // Bytes handed over, fewer than offered when the socket is full, or -1: errno is EAGAIN when none fitted.
  ssize_t send(std::vector<iovec>& parts) {
    if (tls_) return tls_->send(parts.data(), parts.size());
    msghdr message{};
    message.msg_iov = parts.data(), message.msg_iovlen = parts.size();
    return sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  // Nothing has arrived and the peer is still there: what a connection at rest looks like.
  bool is_quiet() const {
    char byte;
    if (tls_ && tls_->has_pending()) return false;
    return recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }

 private:
  const int socket_;
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace mooncake
