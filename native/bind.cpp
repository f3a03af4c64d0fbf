// SPDX-License-Identifier: Apache-2.0
// The whole Python surface; mooncake/_native.pyi documents it. Columns come in as numpy arrays and are
// copied before the interpreter lock is dropped; whatever may block or copies bytes runs without the
// lock, and no native thread ever takes it.

#include "bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "crc32c.h"
#include "cuda_ipc.h"
#include "file.h"
#include "shared_file.h"
#include "shm.h"
#include "tcp.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mooncake;

namespace {

using Column = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>;

Clock::time_point deadline_in(double timeout_s) {
  double bounded = std::min(std::max(timeout_s, 0.0), 1e6);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

Request request_of(Op op, const Column& local, const Column& remote, const Column& lengths, double timeout_s,
                   bool checksum, int priority = 0, bool reports = false) {
  if (local.size() != remote.size() || local.size() != lengths.size())
    throw nb::value_error("columns differ in length");
  Request request{op, std::vector<Slice>(local.size()), checksum, deadline_in(timeout_s), priority, reports};
  for (size_t i = 0; i < local.size(); i++) request.slices[i] = {local.data()[i], remote.data()[i], lengths.data()[i]};
  return request;
}

// One slice in numbers: arrays of one row would take longer to make than a few KiB to move.
nb::object run_slice(Peer& self, Op op, uint64_t local, uint64_t remote, uint64_t length, double timeout_s,
                     bool checksum) {
  Completion completion;
  {
    Unlocked unlocked;
    completion = self.run(Request{op, {Slice{local, remote, length}}, checksum, deadline_in(timeout_s)});
  }
  if (completion.status != Status::kOk) return nb::cast(std::move(completion));
  return nb::int_(completion.checksums.empty() ? 0u : completion.checksums[0]);
}

Sums array_of(const std::vector<uint32_t>& values) {
  auto* copied = new uint32_t[values.size() + 1];
  std::copy(values.begin(), values.end(), copied);
  return Sums(copied, {values.size()},
              nb::capsule(copied, [](void* p) noexcept { delete[] static_cast<uint32_t*>(p); }));
}

// Bytes of a region, here or of a peer, as a Python buffer; keeps the mapping alive.
struct View {
  RegionRef region;
  uint64_t address;
  uint64_t size;
};

int fill_view(PyObject* self, Py_buffer* buffer, int flags) {
  auto* view = nb::inst_ptr<View>(self);
  return PyBuffer_FillInfo(buffer, self, reinterpret_cast<void*>(view->address), static_cast<Py_ssize_t>(view->size), 1,
                           flags);
}

int fill_region(PyObject* self, Py_buffer* buffer, int flags) {
  auto* region = nb::inst_ptr<Region>(self);
  if (region->medium) {
    PyErr_Format(PyExc_BufferError, "a region of kind %s has no bytes in memory; move them", region->kind.c_str());
    return -1;
  }
  return PyBuffer_FillInfo(buffer, self, reinterpret_cast<void*>(region->address),
                           static_cast<Py_ssize_t>(region->size), !region->is_writable, flags);
}

void raise_unless_ok(const Outcome& outcome, const char* step) {
  if (outcome.status != Status::kOk) throw std::system_error(outcome.error, std::generic_category(), step);
}

// The owner's own access to a region, for bytes that have no view.
void move_whole(Region& region, Op op, nb::handle buffer, uint64_t offset) {
  Py_buffer bytes;
  int flags = op == Op::kRead ? PyBUF_WRITABLE : PyBUF_SIMPLE;
  if (PyObject_GetBuffer(buffer.ptr(), &bytes, flags) != 0) throw nb::python_error();
  Outcome outcome{Status::kAccessDenied};
  auto length = static_cast<uint64_t>(bytes.len);
  bool is_inside = region.contains(region.address + offset, length) && (region.is_writable || op == Op::kRead);
  {
    Unlocked unlocked;
    if (is_inside && region.enter()) {
      auto* here = reinterpret_cast<uint8_t*>(region.address + offset);
      outcome = {};
      if (region.medium && op == Op::kRead) outcome = region.medium->read(offset, bytes.buf, length);
      else if (region.medium) outcome = region.medium->write(offset, bytes.buf, length);
      else std::memcpy(op == Op::kRead ? bytes.buf : here, op == Op::kRead ? here : bytes.buf, length);
      region.leave();
    }
  }
  PyBuffer_Release(&bytes);
  if (outcome.status == Status::kAccessDenied) throw nb::value_error("outside the region, closed or read-only");
  if (outcome.status != Status::kOk)
    throw std::system_error(outcome.error, std::generic_category(), "moving bytes of a " + region.kind + " region");
}

PyType_Slot kViewSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(fill_view)}, {0, nullptr}};
PyType_Slot kRegionSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(fill_region)}, {0, nullptr}};

void bind_slices(nb::module_& m) {
  nb::enum_<Op>(m, "Op", nb::is_arithmetic()).value("WRITE", Op::kWrite).value("READ", Op::kRead);
  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
      .value("OK", Status::kOk)
      .value("PEER_LOST", Status::kPeerLost)
      .value("ACCESS_DENIED", Status::kAccessDenied)
      .value("CANCELLED", Status::kCancelled)
      .value("TIMED_OUT", Status::kTimedOut)
      .value("UNREGISTERED", Status::kUnregistered)
      .value("PROTOCOL_ERROR", Status::kProtocolError)
      .value("IO_ERROR", Status::kIoError);
  nb::class_<Completion>(m, "Completion")
      .def(
          "__init__",
          [](Completion* self, uint64_t token, Status status, int64_t failed_slice, uint64_t num_bytes,
             std::vector<uint32_t> checksums, std::string reason) {
            new (self) Completion{token, status, failed_slice, num_bytes, std::move(checksums)};
            self->reason = std::move(reason);
          },
          "token"_a = 0, "status"_a = Status::kOk, "failed_slice"_a = -1, "num_bytes"_a = 0,
          "checksums"_a = std::vector<uint32_t>(), "reason"_a = "")
      .def_ro("token", &Completion::token)
      .def_ro("status", &Completion::status)
      .def_ro("failed_slice", &Completion::failed_slice)
      .def_ro("num_bytes", &Completion::num_bytes)
      .def_ro("is_partial", &Completion::is_partial)
      .def_ro("reason", &Completion::reason)
      .def_prop_ro("checksums",
                   [](const Completion& self) -> nb::object {
                     return self.checksums.empty() ? nb::none() : nb::cast(array_of(self.checksums));
                   })
      .def("__repr__", [](const Completion& self) {
        return nb::str("Completion(token={}, status={}{}{}, failed_slice={}, num_bytes={})")
            .format(self.token, nb::cast(self.status).attr("name"), self.reason.empty() ? "" : ": ", self.reason,
                    self.failed_slice, self.num_bytes);
      });
}

void bind_regions(nb::module_& m) {
  nb::class_<Region>(m, "Region", nb::type_slots(kRegionSlots), nb::dynamic_attr())
      .def_ro("address", &Region::address)
      .def_ro("size_bytes", &Region::size)
      .def_ro("key", &Region::key)
      .def_ro("kind", &Region::kind)
      .def_prop_ro("is_shared", &Region::is_shared)
      .def_ro("is_writable", &Region::is_writable)
      .def_prop_ro("is_closed", &Region::is_closed)
      .def("enter", &Region::enter)
      .def("leave", &Region::leave)
      .def_prop_ro("how",
                   [](const Region& self) {
                     auto* file = dynamic_cast<const FileMedium*>(self.medium.get());
                     return file ? file->how() : self.kind;
                   })
      .def("flush",
           [](Region& self) {
             Outcome outcome{Status::kIoError, EBADF};
             if (!self.medium) return;
             {
               Unlocked unlocked;
               if (self.enter()) {
                 outcome = self.medium->flush();
                 self.leave();
               }
             }
             raise_unless_ok(outcome, "flush");
           })
      .def(
          "provide",
          [](Region& self, uint64_t offset, uint64_t size) {
            bool is_inside = offset <= self.size && size <= self.size - offset;
            Outcome outcome{Status::kIoError, is_inside ? EBADF : EINVAL};
            if (!self.medium) return;
            {
              Unlocked unlocked;
              if (is_inside && self.enter()) {
                outcome = self.medium->provide(offset, size);
                self.leave();
              }
            }
            raise_unless_ok(outcome, "provide");
          },
          "offset"_a, "size_bytes"_a)
      .def("__repr__",
           [](nb::handle self) {
             auto& region = *nb::inst_ptr<Region>(self);
             auto* file = dynamic_cast<const FileMedium*>(region.medium.get());
             nb::object path = nb::hasattr(self, "path") ? nb::object(self.attr("path")) : nb::none();
             nb::str what = file ? nb::str(" {}, {}").format(path, file->how()) : nb::str("");
             return nb::str("<Region {}{} {:#x} +{}{}>")
                 .format(region.kind, what, region.address, region.size, region.is_closed() ? " closed" : "");
           })
      .def("view", [](nb::handle self) { return nb::steal(PyMemoryView_FromObject(self.ptr())); })
      .def(
          "read_into",
          [](Region& self, nb::handle buffer, uint64_t offset) { move_whole(self, Op::kRead, buffer, offset); },
          "buffer"_a, "offset"_a = 0)
      .def(
          "write_from",
          [](Region& self, nb::handle buffer, uint64_t offset) { move_whole(self, Op::kWrite, buffer, offset); },
          "buffer"_a, "offset"_a = 0);
  nb::class_<View>(m, "View", nb::type_slots(kViewSlots));
  nb::class_<RegionTable>(m, "RegionTable")
      .def(nb::new_([] { return std::make_shared<RegionTable>(); }))
      .def(
          "allocate",
          [](RegionTable& self, uint64_t size, bool huge_pages, bool populate) {
            std::string error;
            RegionRef region;
            {
              Unlocked unlocked;
              region = self.allocate(size, huge_pages, populate, error);
            }
            if (!region) {
              PyErr_SetString(PyExc_MemoryError, error.c_str());
              throw nb::python_error();
            }
            return region;
          },
          "size_bytes"_a, "huge_pages"_a, "populate"_a)
      .def(
          "open_file",
          [](RegionTable& self, const std::string& path, uint64_t size, bool is_writable, bool direct, bool ring,
             int depth) {
            Unlocked unlocked;
            auto file = std::make_shared<FileMedium>(path, size, FileMedium::Options{is_writable, direct, ring, depth});
            return self.add_medium(file->address(), file->size(), is_writable, "file", file);
          },
          "path"_a, "size_bytes"_a, "is_writable"_a, "direct"_a, "ring"_a, "depth"_a)
      .def("add", &RegionTable::add, "address"_a, "size_bytes"_a, "is_writable"_a, "is_brief"_a = false)
      .def("remove", &RegionTable::remove, "key"_a, nb::call_guard<Unlocked>())
      .def("remove_all", &RegionTable::remove_all, nb::call_guard<Unlocked>())
      .def("all", &RegionTable::all);
}

void bind_queue(nb::module_& m) {
  nb::class_<Queue>(m, "Queue")
      .def(nb::new_([] { return std::make_shared<Queue>(); }))
      .def("fileno", &Queue::fileno)
      .def("push", &Queue::push, "completion"_a)
      .def("drain", &Queue::drain, "max_items"_a = 256, "timeout_s"_a = 0.0, nb::call_guard<Unlocked>());
}

void bind_peer(nb::module_& m) {
  nb::class_<Peer>(m, "Peer")
      .def_prop_ro("is_lost", &Peer::is_lost)
      .def(
          "run",
          [](Peer& self, Op op, Column local, Column remote, Column lengths, double timeout_s, bool checksum) {
            Request request = request_of(op, local, remote, lengths, timeout_s, checksum);
            Unlocked unlocked;
            return self.run(std::move(request));
          },
          "op"_a, "local"_a, "remote"_a, "lengths"_a, "timeout_s"_a, "checksum"_a)
      .def("run_slice", &run_slice, "op"_a, "local"_a, "remote"_a, "length"_a, "timeout_s"_a, "checksum"_a)
      .def(
          "submit",
          [](Peer& self, std::shared_ptr<Queue> queue, uint64_t token, Op op, Column local, Column remote,
             Column lengths, double timeout_s, bool checksum, int priority, bool reports) {
            Request request = request_of(op, local, remote, lengths, timeout_s, checksum, priority, reports);
            Unlocked unlocked;
            int64_t failed_slice = -1;
            self.submit(std::move(queue), token, std::move(request), failed_slice);
            return failed_slice;
          },
          "queue"_a, "token"_a, "op"_a, "local"_a, "remote"_a, "lengths"_a, "timeout_s"_a, "checksum"_a,
          "priority"_a = 0, "reports"_a = false)
      .def(
          "set_remote", [](Peer& self, const std::vector<RemoteTuple>& remote) { self.set_remote(remote_of(remote)); },
          "regions"_a)
      .def("cancel", &Peer::cancel, nb::call_guard<Unlocked>())
      .def("close", &Peer::close, nb::call_guard<Unlocked>());
}

// A peer of type P, or the status that says why there is none.
template <typename P>
nb::object connected(SharingTransport& transport, const std::string& endpoint, uint64_t epoch,
                     const std::vector<RemoteTuple>& remote, double timeout_s) {
  Status status;
  std::shared_ptr<SharingPeer> peer;
  {
    Unlocked unlocked;
    peer = transport.connect(endpoint, epoch, remote_of(remote), deadline_in(timeout_s), status);
  }
  return peer ? nb::cast(std::static_pointer_cast<P>(peer)) : nb::cast(status);
}

void bind_shm(nb::module_& m) {
  nb::class_<ShmPeer, Peer>(m, "ShmPeer")
      .def(
          "view",
          [](ShmPeer& self, uint64_t address, uint64_t size, double timeout_s) -> nb::object {
            View view{nullptr, 0, size};
            {
              Unlocked unlocked;
              view.region = self.view(address, size, deadline_in(timeout_s), view.address);
            }
            return view.region ? nb::cast(std::move(view)) : nb::none();
          },
          "address"_a, "size_bytes"_a, "timeout_s"_a);
  nb::class_<ShmTransport>(m, "ShmTransport")
      .def(nb::new_([](std::shared_ptr<RegionTable> regions, uint64_t epoch) {
             auto transport = std::make_shared<ShmTransport>(regions, epoch);
             regions->listen(transport);
             return transport;
           }),
           "regions"_a, "epoch"_a)
      .def_prop_ro("endpoint", &ShmTransport::endpoint)
      .def(
          "connect",
          [](ShmTransport& self, const std::string& endpoint, uint64_t epoch, const std::vector<RemoteTuple>& remote,
             double timeout_s) { return connected<ShmPeer>(self, endpoint, epoch, remote, timeout_s); },
          "endpoint"_a, "epoch"_a, "regions"_a, "timeout_s"_a)
      .def("close", &ShmTransport::close, nb::call_guard<Unlocked>());
}

void bind_file(nb::module_& m) {
  nb::class_<FilePeer, Peer>(m, "FilePeer")
      .def(nb::new_([](std::shared_ptr<RegionTable> local, std::shared_ptr<RegionTable> far,
                       const std::vector<RemoteTuple>& remote) {
             auto peer = std::make_shared<FilePeer>(local, far, remote_of(remote), 2);
             local->listen(peer);
             return peer;
           }),
           "local"_a, "far"_a, "regions"_a);
  nb::class_<SharedFilePeer, Peer>(m, "SharedFilePeer");
  nb::class_<SharedFileTransport>(m, "SharedFileTransport")
      .def(nb::new_([](std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::string& endpoint) {
             auto transport = std::make_shared<SharedFileTransport>(regions, epoch, endpoint);
             regions->listen(transport);
             return transport;
           }),
           "regions"_a, "epoch"_a, "endpoint"_a)
      .def(
          "connect",
          [](SharedFileTransport& self, const std::string& endpoint, uint64_t epoch,
             const std::vector<RemoteTuple>& remote,
             double timeout_s) { return connected<SharedFilePeer>(self, endpoint, epoch, remote, timeout_s); },
          "endpoint"_a, "epoch"_a, "regions"_a, "timeout_s"_a)
      .def("close", &SharedFileTransport::close, nb::call_guard<Unlocked>());
}

void bind_tcp(nb::module_& m) {
  nb::class_<TlsContext>(m, "TlsContext")
      .def(nb::new_([](const std::string& certificate, const std::string& key, const std::string& authority,
                       bool check_host) {
             std::string field, error;
             auto context = TlsContext::make({certificate, key, authority}, check_host, field, error);
             if (!context) {
               nb::object value = nb::make_tuple(field, error);
               PyErr_SetObject(PyExc_ValueError, value.ptr());
               throw nb::python_error();
             }
             return context;
           }),
           "certificate"_a, "key"_a, "authority"_a, "check_host"_a);
  nb::class_<TcpServer>(m, "TcpServer")
      .def(nb::new_([](std::shared_ptr<RegionTable> regions, uint64_t epoch, const std::vector<std::string>& hosts,
                       int port, int num_threads, std::shared_ptr<TlsContext> tls, double greeting_s, double stall_s,
                       size_t max_connections) {
             auto milliseconds = [](double seconds) {
               return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
             };
             TcpLimits limits{milliseconds(greeting_s), milliseconds(stall_s), max_connections};
             return std::make_shared<TcpServer>(regions, epoch, hosts, port, num_threads, tls, limits);
           }),
           "regions"_a, "epoch"_a, "hosts"_a, "port"_a, "num_threads"_a, "tls"_a.none() = nb::none(),
           "greeting_s"_a = 5.0, "stall_s"_a = 30.0, "max_connections"_a = 4096)
      .def_prop_ro("ports", &TcpServer::ports)
      .def("close", &TcpServer::close, nb::call_guard<Unlocked>());
  nb::class_<TcpPeer, Peer>(m, "TcpPeer")
      .def(nb::new_([](std::shared_ptr<RegionTable> regions, const std::vector<RemoteTuple>& remote,
                       const std::string& host, int port, uint64_t epoch, int num_streams,
                       const std::string& source_host, std::shared_ptr<TlsContext> tls) {
             auto address = TcpAddress::parse(host, port);
             if (!address) throw nb::value_error("host is not a numeric address");
             auto source = TcpAddress::parse(source_host, 0);
             if (!source && !source_host.empty()) throw nb::value_error("source_host is not a numeric address");
             auto peer =
                 std::make_shared<TcpPeer>(regions, remote_of(remote), *address, epoch, num_streams, source, tls);
             regions->listen(peer);
             return peer;
           }),
           "local"_a, "regions"_a, "host"_a, "port"_a, "epoch"_a, "num_streams"_a, "source_host"_a = "",
           "tls"_a.none() = nb::none());
}

template <typename T>
std::shared_ptr<T> or_raise(std::shared_ptr<T> found, const std::string& why, PyObject* type) {
  if (found) return found;
  PyErr_SetString(type, why.c_str());
  throw nb::python_error();
}

void bind_cuda(nb::module_& m) {
  using cuda::Cuda;
  nb::class_<cuda::DeviceInfo>(m, "CudaDevice")
      .def_ro("number", &cuda::DeviceInfo::number)
      .def_ro("name", &cuda::DeviceInfo::name)
      .def_ro("bus_id", &cuda::DeviceInfo::bus_id)
      .def_ro("size_bytes", &cuda::DeviceInfo::size);
  nb::class_<Cuda>(m, "Cuda")
      .def(nb::new_([](const std::string& library) {
             std::string why;
             std::shared_ptr<Cuda> found;
             {
               Unlocked unlocked;
               found = Cuda::open(library, why);
             }
             return or_raise(std::move(found), why, PyExc_OSError);
           }),
           "library"_a)
      .def_static("why_not_there", &Cuda::why_not_there, "library"_a)
      .def_static("is_device_memory", &Cuda::is_device_memory, "library"_a, "address"_a)
      .def_prop_ro("devices", &Cuda::devices)
      .def(
          "add",
          [](Cuda& self, RegionTable& regions, uint64_t address, uint64_t size, bool is_writable) {
            std::string why;
            RegionRef region;
            {
              Unlocked unlocked;
              region = self.add(regions, address, size, is_writable, why);
            }
            return or_raise(std::move(region), why, PyExc_ValueError);
          },
          "regions"_a, "address"_a, "size_bytes"_a, "is_writable"_a)
      .def(
          "allocate",
          [](Cuda& self, RegionTable& regions, int device, uint64_t size) {
            std::string why;
            RegionRef region;
            {
              Unlocked unlocked;
              region = self.allocate(regions, device, size, why);
            }
            return or_raise(std::move(region), why, PyExc_MemoryError);
          },
          "regions"_a, "device"_a, "size_bytes"_a)
      .def(
          "pin",
          [](Cuda& self, Region& region) {
            std::string why;
            {
              Unlocked unlocked;
              why = self.pin(region);
            }
            if (!why.empty()) {
              PyErr_SetString(PyExc_OSError, why.c_str());
              throw nb::python_error();
            }
          },
          "region"_a)
      .def("is_pinned", &Cuda::is_pinned, "region"_a);
  nb::class_<cuda::CudaPeer, Peer>(m, "CudaPeer");
  nb::class_<cuda::CudaTransport>(m, "CudaTransport")
      .def(nb::new_([](std::shared_ptr<Cuda> cuda, std::shared_ptr<RegionTable> regions, uint64_t epoch,
                       const std::string& endpoint) {
             auto transport = std::make_shared<cuda::CudaTransport>(cuda, regions, epoch, endpoint);
             regions->listen(transport);
             return transport;
           }),
           "cuda"_a, "regions"_a, "epoch"_a, "endpoint"_a)
      .def(
          "connect",
          [](cuda::CudaTransport& self, const std::string& endpoint, uint64_t epoch,
             const std::vector<RemoteTuple>& remote,
             double timeout_s) { return connected<cuda::CudaPeer>(self, endpoint, epoch, remote, timeout_s); },
          "endpoint"_a, "epoch"_a, "regions"_a, "timeout_s"_a)
      .def("close", &cuda::CudaTransport::close, nb::call_guard<Unlocked>());
}

void bind_checksums(nb::module_& m) {
  m.def(
      "crc32c",
      [](nb::handle data, uint32_t seed) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
        uint32_t sum;
        {
          Unlocked unlocked;
          sum = crc32c(buffer.buf, static_cast<size_t>(buffer.len), seed);
        }
        PyBuffer_Release(&buffer);
        return sum;
      },
      "data"_a, "seed"_a = 0);
  m.def("crc32c_combine", &crc32c_combine, "a"_a, "b"_a, "length_b"_a);
  m.def(
      "crc32c_columns",
      [](Column addresses, Column lengths) {
        if (addresses.size() != lengths.size()) throw nb::value_error("columns differ in length");
        std::vector<uint32_t> sums(addresses.size());
        {
          Unlocked unlocked;
          for (size_t i = 0; i < sums.size(); i++)
            sums[i] = crc32c(reinterpret_cast<const void*>(addresses.data()[i]), lengths.data()[i]);
        }
        return array_of(sums);
      },
      "addresses"_a, "lengths"_a);
  m.def("crc32c_implementation", &crc32c_implementation);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // at interpreter exit daemon threads may still hold objects
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const std::system_error& error) {
      nb::object value = nb::make_tuple(error.code().value(), nb::str(error.what()));
      PyErr_SetObject(PyExc_OSError, value.ptr());
    }
  });
  bind_slices(m);
  bind_regions(m);
  bind_queue(m);
  bind_peer(m);
  bind_shm(m);
  bind_cuda(m);
  bind_file(m);
  bind_tcp(m);
  bind_rdma(m);
  bind_checksums(m);
}
