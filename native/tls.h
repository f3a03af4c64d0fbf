// SPDX-License-Identifier: Apache-2.0
// TLS 1.3 between members of one cluster: both sides show a certificate of the same authority.
//
// libssl.so.3 is opened when the first context is made, so nothing is linked and a machine without it
// runs everything but this. The few functions needed are declared by hand: all types are opaque. A
// session works on a non-blocking socket that its caller owns and is used by one thread at a time.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mooncake {

struct TlsFiles {
  std::string certificate;  // PEM, the chain from our own upwards
  std::string key;          // PEM, without a password
  std::string authority;    // PEM, whose certificates we trust
};

class TlsSession;

struct TlsSocket {
  int fd = -1;
  bool has_ended = false;  // the peer closed its side
  bool may_read = true;    // else a read finds nothing yet
};

// What all connections of a process have in common. Shared by threads.
class TlsContext : public std::enable_shared_from_this<TlsContext> {
 public:
  // Null and `error` when libssl is missing or a file is not what it should be; `field` says which.
  static std::shared_ptr<TlsContext> make(const TlsFiles& files, bool check_host, std::string& field,
                                          std::string& error);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // `host` is the numeric address that the peer's certificate must name, if we check that.
  std::unique_ptr<TlsSession> session(int socket, bool is_server, const std::string& host = {});

 private:
  TlsContext() = default;
  friend class TlsSession;
  void* context_ = nullptr;  // SSL_CTX
  bool check_host_ = false;
};

class TlsSession {
 public:
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  enum class Step { kDone, kWantsRead, kWantsWrite, kFailed };
  // The handshake; a server need not call it, the first receive() does it.
  Step handshake();
  // Whether the handshake may read: what the session has read can't be looked at by others any longer.
  void allow_reads(bool allowed) { socket_.may_read = allowed; }

  ssize_t receive(const iovec* parts, size_t count, bool& drained);  // as Channel's
  ssize_t send(const iovec* parts, size_t count);
  bool has_pending() const;                                // bytes that left the socket and were not received yet
  const std::string& trouble() const { return trouble_; }  // why a call failed, in words; empty when it did not

 private:
  friend class TlsContext;
  TlsSession(std::shared_ptr<TlsContext> context, int socket, bool is_server, const std::string& host);
  Step judge(int result);

  const std::shared_ptr<TlsContext> context_;
  TlsSocket socket_;
  void* ssl_ = nullptr;          // SSL
  std::vector<uint8_t> staged_;  // small pieces that travel in one record
  size_t half_sent_ = 0;         // plain bytes of a record that the socket has not taken whole
  bool is_over_ = false;
  bool failed_ = false;
  std::string trouble_;
};

}  // namespace mooncake
