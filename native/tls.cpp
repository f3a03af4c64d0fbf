// SPDX-License-Identifier: Apache-2.0
#include "tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace mooncake {

namespace {

// From OpenSSL 3's headers; all of it is part of its stable interface.
constexpr int kPem = 1;              // SSL_FILETYPE_PEM
constexpr int kSetMinVersion = 123;  // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr long kTls13 = 0x0304;      // TLS1_3_VERSION
constexpr int kMode = 33;            // SSL_CTRL_MODE
constexpr long kPartialWrite = 1, kMovingBuffer = 2, kReleaseBuffers = 16;
constexpr int kReadAhead = 41;  // SSL_CTRL_SET_READ_AHEAD
constexpr int kVerifyPeer = 1, kRequireCertificate = 2;
constexpr int kErrorWantsRead = 2, kErrorWantsWrite = 3, kErrorEnd = 6;
constexpr uint64_t kIgnoreUnexpectedEnd = 1u << 7;  // SSL_OP_IGNORE_UNEXPECTED_EOF
constexpr int kBioType = 0x0400 | 100;              // BIO_TYPE_SOURCE_SINK and a number of our own
constexpr int kBioRead = 1, kBioWrite = 2, kBioRetry = 8;
constexpr int kBioFlush = 11, kBioEnd = 2;  // BIO_CTRL_FLUSH, BIO_CTRL_EOF

constexpr size_t kRecord = 16 << 10;      // the largest plain part of a TLS record
constexpr size_t kReadBuffer = 72 << 10;  // four records and their frames in one system call
constexpr size_t kStep = 512 << 10;       // plain bytes per call, so that no connection hogs its thread

struct Library {
  void* (*TLS_method)();
  void* (*SSL_CTX_new)(void*);
  void (*SSL_CTX_free)(void*);
  long (*SSL_CTX_ctrl)(void*, int, long, void*);
  uint64_t (*SSL_CTX_set_options)(void*, uint64_t);
  int (*SSL_CTX_set_ciphersuites)(void*, const char*);
  int (*SSL_CTX_use_certificate_chain_file)(void*, const char*);
  int (*SSL_CTX_use_PrivateKey_file)(void*, const char*, int);
  int (*SSL_CTX_check_private_key)(void*);
  int (*SSL_CTX_load_verify_locations)(void*, const char*, const char*);
  void (*SSL_CTX_set_verify)(void*, int, void*);
  int (*SSL_CTX_set_num_tickets)(void*, size_t);
  void (*SSL_CTX_set_default_read_buffer_len)(void*, size_t);
  void (*SSL_CTX_set_default_passwd_cb)(void*, int (*)(char*, int, int, void*));
  void* (*SSL_new)(void*);
  void (*SSL_free)(void*);
  void (*SSL_set_bio)(void*, void*, void*);
  void (*SSL_set_accept_state)(void*);
  void (*SSL_set_connect_state)(void*);
  int (*SSL_do_handshake)(void*);
  int (*SSL_read_ex)(void*, void*, size_t, size_t*);
  int (*SSL_write_ex)(void*, const void*, size_t, size_t*);
  int (*SSL_get_error)(const void*, int);
  int (*SSL_has_pending)(const void*);
  long (*SSL_get_verify_result)(const void*);
  void* (*SSL_get0_param)(void*);
  int (*X509_VERIFY_PARAM_set1_ip_asc)(void*, const char*);
  const char* (*X509_verify_cert_error_string)(long);
  void* (*BIO_meth_new)(int, const char*);
  int (*BIO_meth_set_read)(void*, int (*)(void*, char*, int));
  int (*BIO_meth_set_write)(void*, int (*)(void*, const char*, int));
  int (*BIO_meth_set_ctrl)(void*, long (*)(void*, int, long, void*));
  void* (*BIO_new)(void*);
  void (*BIO_set_data)(void*, void*);
  void* (*BIO_get_data)(void*);
  void (*BIO_set_init)(void*, int);
  void (*BIO_set_flags)(void*, int);
  void (*BIO_clear_flags)(void*, int);
  unsigned long (*ERR_get_error)();
  void (*ERR_clear_error)();
  const char* (*ERR_reason_error_string)(unsigned long);
  int (*OPENSSL_init_ssl)(uint64_t, const void*);

  void* socket_bio = nullptr;  // BIO_METHOD
  std::string error;
};

Library library;

TlsSocket& socket_of(void* bio) { return *static_cast<TlsSocket*>(library.BIO_get_data(bio)); }

// OpenSSL's own socket BIO writes in a way that raises SIGPIPE in programs that do not ignore it.
int bio_write(void* bio, const char* bytes, int size) {
  library.BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  ssize_t sent = ::send(socket_of(bio).fd, bytes, static_cast<size_t>(size), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) library.BIO_set_flags(bio, kBioWrite | kBioRetry);
  return static_cast<int>(sent);
}

int bio_read(void* bio, char* into, int size) {
  library.BIO_clear_flags(bio, kBioRead | kBioWrite | kBioRetry);
  if (!socket_of(bio).may_read) return library.BIO_set_flags(bio, kBioRead | kBioRetry), -1;
  ssize_t received = ::recv(socket_of(bio).fd, into, static_cast<size_t>(size), MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) library.BIO_set_flags(bio, kBioRead | kBioRetry);
  if (received == 0) socket_of(bio).has_ended = true;
  return static_cast<int>(received);
}

long bio_control(void* bio, int command, long, void*) {
  if (command == kBioEnd) return socket_of(bio).has_ended;
  return command == kBioFlush ? 1 : 0;
}

// All symbols or an error; never closed, because its threads may outlive us.
void open_library() {
  void* handle = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    library.error =
        "OpenSSL 3 is not on this machine (libssl.so.3): install Debian's libssl3 or its like, or turn TLS off";
    return;
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function) library.error = std::string("this libssl.so.3 has no ") + name + "; install OpenSSL 3.0 or later";
  };
#define FIND(name) find(library.name, #name)
  FIND(TLS_method), FIND(SSL_CTX_new), FIND(SSL_CTX_free), FIND(SSL_CTX_ctrl), FIND(SSL_CTX_set_options);
  FIND(SSL_CTX_set_ciphersuites), FIND(SSL_CTX_use_certificate_chain_file), FIND(SSL_CTX_use_PrivateKey_file);
  FIND(SSL_CTX_check_private_key), FIND(SSL_CTX_load_verify_locations), FIND(SSL_CTX_set_verify);
  FIND(SSL_CTX_set_num_tickets), FIND(SSL_CTX_set_default_read_buffer_len), FIND(SSL_CTX_set_default_passwd_cb);
  FIND(SSL_new), FIND(SSL_free), FIND(SSL_set_bio), FIND(SSL_set_accept_state), FIND(SSL_set_connect_state);
  FIND(SSL_do_handshake), FIND(SSL_read_ex), FIND(SSL_write_ex), FIND(SSL_get_error), FIND(SSL_has_pending);
  FIND(SSL_get_verify_result), FIND(SSL_get0_param), FIND(X509_VERIFY_PARAM_set1_ip_asc);
  FIND(X509_verify_cert_error_string), FIND(BIO_meth_new), FIND(BIO_meth_set_read), FIND(BIO_meth_set_write);
  FIND(BIO_meth_set_ctrl), FIND(BIO_new), FIND(BIO_set_data), FIND(BIO_get_data), FIND(BIO_set_init);
  FIND(BIO_set_flags), FIND(BIO_clear_flags), FIND(ERR_get_error), FIND(ERR_clear_error);
  FIND(ERR_reason_error_string), FIND(OPENSSL_init_ssl);
#undef FIND
  if (!library.error.empty()) return;
  constexpr uint64_t kNoAtExit = 0x00080000;  // a thread may still be sending while the process ends
  library.OPENSSL_init_ssl(kNoAtExit, nullptr);
  library.socket_bio = library.BIO_meth_new(kBioType, "mooncake socket");
  library.BIO_meth_set_write(library.socket_bio, bio_write);
  library.BIO_meth_set_read(library.socket_bio, bio_read);
  library.BIO_meth_set_ctrl(library.socket_bio, bio_control);
}

// The first thing this thread's failed call complained about.
std::string complaint() {
  const char* words = nullptr;
  if (unsigned long code = library.ERR_get_error()) words = library.ERR_reason_error_string(code);
  library.ERR_clear_error();
  return words ? words : "no reason given";
}

int no_password(char*, int, int, void*) { return 0; }  // else OpenSSL prompts at the terminal

}  // namespace

std::shared_ptr<TlsContext> TlsContext::make(const TlsFiles& files, bool check_host, std::string& field,
                                             std::string& error) {
  static std::once_flag opened;
  std::call_once(opened, open_library);
  field = "tls";
  if (!library.error.empty()) return error = library.error, nullptr;
  library.ERR_clear_error();
  std::shared_ptr<TlsContext> context(new TlsContext);
  void* made = context->context_ = library.SSL_CTX_new(library.TLS_method());
  context->check_host_ = check_host;
  if (!made) return error = complaint(), nullptr;
  library.SSL_CTX_ctrl(made, kSetMinVersion, kTls13, nullptr);
  library.SSL_CTX_ctrl(made, kMode, kPartialWrite | kMovingBuffer | kReleaseBuffers, nullptr);
  library.SSL_CTX_ctrl(made, kReadAhead, 1, nullptr);
  library.SSL_CTX_set_default_read_buffer_len(made, kReadBuffer);
  library.SSL_CTX_set_options(made, kIgnoreUnexpectedEnd);
  library.SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
  library.SSL_CTX_set_num_tickets(made, 0);  // a lane at rest must be silent, and sessions are not resumed
  library.SSL_CTX_set_default_passwd_cb(made, no_password);
  field = "tls_cert";
  if (library.SSL_CTX_use_certificate_chain_file(made, files.certificate.c_str()) != 1)
    return error = complaint(), nullptr;
  field = "tls_key";
  if (library.SSL_CTX_use_PrivateKey_file(made, files.key.c_str(), kPem) != 1 ||
      library.SSL_CTX_check_private_key(made) != 1)
    return error = complaint(), nullptr;
  field = "tls_ca";
  if (library.SSL_CTX_load_verify_locations(made, files.authority.c_str(), nullptr) != 1)
    return error = complaint(), nullptr;
  library.SSL_CTX_set_verify(made, kVerifyPeer | kRequireCertificate, nullptr);
  return context;
}

TlsContext::~TlsContext() {
  if (context_) library.SSL_CTX_free(context_);
}

std::unique_ptr<TlsSession> TlsContext::session(int socket, bool is_server, const std::string& host) {
  return std::unique_ptr<TlsSession>(new TlsSession(shared_from_this(), socket, is_server, host));
}

TlsSession::TlsSession(std::shared_ptr<TlsContext> context, int socket, bool is_server, const std::string& host)
    : context_(std::move(context)), socket_{socket}, ssl_(library.SSL_new(context_->context_)) {
  void* bio = ssl_ ? library.BIO_new(library.socket_bio) : nullptr;
  if (!bio) throw std::bad_alloc();
  library.BIO_set_data(bio, &socket_);
  library.BIO_set_init(bio, 1);
  library.SSL_set_bio(ssl_, bio, bio);
  if (is_server) library.SSL_set_accept_state(ssl_);
  else library.SSL_set_connect_state(ssl_);
  if (context_->check_host_ && !is_server)
    library.X509_VERIFY_PARAM_set1_ip_asc(library.SSL_get0_param(ssl_), host.c_str());
}

TlsSession::~TlsSession() { library.SSL_free(ssl_); }

// What a call that moved nothing means. Failed sessions stay failed, as OpenSSL requires.
TlsSession::Step TlsSession::judge(int result) {
  switch (library.SSL_get_error(ssl_, result)) {
    case kErrorWantsRead:
      return Step::kWantsRead;
    case kErrorWantsWrite:
      return Step::kWantsWrite;
    case kErrorEnd:
      is_over_ = true;
      return Step::kFailed;
    default:
      failed_ = true;
      trouble_ = complaint();
      if (long verdict = library.SSL_get_verify_result(ssl_); verdict != 0)
        trouble_ += std::string(": ") + library.X509_verify_cert_error_string(verdict);
      return Step::kFailed;
  }
}

TlsSession::Step TlsSession::handshake() {
  if (failed_ || is_over_) return Step::kFailed;
  library.ERR_clear_error();
  int result = library.SSL_do_handshake(ssl_);
  return result == 1 ? Step::kDone : judge(result);
}

ssize_t TlsSession::receive(const iovec* parts, size_t count, bool& drained) {
  size_t placed = 0;
  Step step = Step::kDone;
  for (size_t i = 0; i < count && step == Step::kDone && placed < kStep; i++) {
    for (size_t at = 0; at < parts[i].iov_len && placed < kStep;) {
      if (failed_ || is_over_) {
        step = Step::kFailed;
        break;
      }
      size_t some = 0;
      library.ERR_clear_error();
      int result = library.SSL_read_ex(ssl_, static_cast<uint8_t*>(parts[i].iov_base) + at,
                                       std::min(parts[i].iov_len - at, kStep - placed), &some);
      if (result != 1) {
        step = judge(result);
        break;
      }
      at += some, placed += some;
    }
  }
  // A want to write can only be an answer to the peer's new keys; it goes out with what we send next.
  drained = step == Step::kWantsRead || step == Step::kWantsWrite;
  if (placed > 0) return static_cast<ssize_t>(placed);
  if (drained) return errno = EAGAIN, -1;
  if (is_over_) return 0;
  return errno = ECONNRESET, -1;
}

// Each record takes 16 KiB; pieces smaller than that are gathered first, so that a frame's head does
// not travel in a record and a system call of its own.
ssize_t TlsSession::send(const iovec* parts, size_t count) {
  size_t sent = 0, part = 0, offset = 0;
  auto skip = [&](size_t bytes) {
    sent += bytes;
    while (bytes > 0) {
      size_t step = std::min(bytes, parts[part].iov_len - offset);
      offset += step, bytes -= step;
      if (offset == parts[part].iov_len) part++, offset = 0;
    }
  };
  while (part < count && sent < kStep) {
    if (failed_ || is_over_) return errno = EPIPE, -1;
    const uint8_t* from = static_cast<const uint8_t*>(parts[part].iov_base) + offset;
    size_t size = parts[part].iov_len - offset;
    if (half_sent_ > 0) {
      size = half_sent_;  // OpenSSL has it encrypted and looks at the length only
    } else if (size >= kRecord || part + 1 == count) {
      size = std::min(size, kRecord);
    } else {
      staged_.clear();
      for (size_t i = part, at = offset; i < count && staged_.size() < kRecord; i++, at = 0) {
        const uint8_t* piece = static_cast<const uint8_t*>(parts[i].iov_base) + at;
        staged_.insert(staged_.end(), piece, piece + std::min(parts[i].iov_len - at, kRecord - staged_.size()));
      }
      from = staged_.data(), size = staged_.size();
    }
    if (size == 0) {
      part++, offset = 0;
      continue;
    }
    size_t taken = 0;
    library.ERR_clear_error();
    int result = library.SSL_write_ex(ssl_, from, size, &taken);
    if (result != 1) {
      if (judge(result) == Step::kFailed) return errno = EPIPE, -1;
      half_sent_ = size;
      break;
    }
    half_sent_ = 0;
    skip(taken);
  }
  if (sent > 0) return static_cast<ssize_t>(sent);
  return errno = EAGAIN, -1;
}

bool TlsSession::has_pending() const { return library.SSL_has_pending(ssl_) != 0; }

}  // namespace mooncake
