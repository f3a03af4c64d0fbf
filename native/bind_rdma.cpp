// SPDX-License-Identifier: Apache-2.0
// The Python surface of the rdma transport; mooncake/_native.pyi documents it. Calls that ask the device
// for something run without the interpreter lock.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "bind.h"
#include "rdma.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake {

namespace {

using AddressTuple = std::tuple<nb::bytes, int, int, int>;  // gid, lid, mtu, reads
using EndTuple = std::tuple<uint32_t, uint32_t>;            // queue pair, first packet
using GrantTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint32_t, bool>;
using RetiredTuple = std::tuple<std::string, uint32_t>;

RdmaAddress address_of(const AddressTuple& tuple) {
  const auto& [gid, lid, mtu, reads] = tuple;
  RdmaAddress address;
  if (gid.size() != address.gid.size()) throw nb::value_error("a gid has 16 bytes");
  std::copy_n(reinterpret_cast<const uint8_t*>(gid.c_str()), gid.size(), address.gid.begin());
  address.lid = static_cast<uint16_t>(lid);
  address.mtu = static_cast<uint8_t>(mtu);
  address.reads = static_cast<uint8_t>(reads);
  return address;
}

std::vector<LaneEnd> ends_of(const std::vector<EndTuple>& tuples) {
  std::vector<LaneEnd> ends;
  for (auto& [pair, psn] : tuples) ends.push_back({pair, psn});
  return ends;
}

std::vector<EndTuple> tuples_of(const std::vector<LaneEnd>& ends) {
  std::vector<EndTuple> tuples;
  for (const LaneEnd& end : ends) tuples.emplace_back(end.pair, end.psn);
  return tuples;
}

void bind_peer(nb::module_& m) {
  nb::class_<RdmaPeer, Peer>(m, "RdmaPeer")
      .def_prop_ro("is_ready", &RdmaPeer::is_ready)
      .def_prop_ro("is_able", &RdmaPeer::is_able)
      .def(
          "set_remote",
          [](RdmaPeer& self, const std::vector<RemoteTuple>& remote) { self.set_regions(remote_of(remote)); },
          "regions"_a)
      .def("unknown_keys", &RdmaPeer::unknown_keys, "limit"_a)
      .def(
          "learn",
          [](RdmaPeer& self, const std::vector<GrantTuple>& tuples) {
            std::vector<Grant> grants;
            for (auto& [key, address, size, remote_key, is_writable] : tuples)
              grants.push_back({key, address, size, remote_key, is_writable});
            self.learn(grants);
          },
          "grants"_a)
      .def("offer",
           [](RdmaPeer& self) {
             Unlocked unlocked;
             return tuples_of(self.offer());
           })
      .def(
          "join",
          [](RdmaPeer& self, const AddressTuple& peer, const std::vector<EndTuple>& theirs) {
            RdmaAddress address = address_of(peer);
            Unlocked unlocked;
            self.join(address, ends_of(theirs));
          },
          "peer"_a, "theirs"_a)
      .def("retired",
           [](const RdmaPeer& self) {
             std::vector<RetiredTuple> tuples;
             for (const RetiredLane& lane : self.retired()) tuples.emplace_back(lane.device, lane.pair);
             return tuples;
           })
      .def(
          "forget_retired",
          [](RdmaPeer& self, const std::vector<RetiredTuple>& tuples) {
            std::vector<RetiredLane> lanes;
            for (auto& [device, pair] : tuples) lanes.push_back({device, pair});
            self.forget_retired(lanes);
          },
          "lanes"_a);
}

}  // namespace

void bind_rdma(nb::module_& m) {
  m.def("rdma_devices", &RdmaDevice::names);
  bind_peer(m);
  nb::class_<RdmaTransport>(m, "RdmaTransport")
      .def(nb::new_([](std::shared_ptr<RegionTable> regions, const std::vector<std::string>& devices, int port,
                       int gid_index, int traffic_class) {
             auto transport =
                 std::make_shared<RdmaTransport>(regions, devices, RdmaOptions{gid_index, port, traffic_class});
             regions->listen(transport);
             return transport;
           }),
           "regions"_a, "devices"_a, "port"_a, "gid_index"_a, "traffic_class"_a)
      .def(
          "address",
          [](const RdmaTransport& self, const std::string& name) -> nb::object {
            auto device = self.device(name);
            if (!device) return nb::none();
            const RdmaAddress& address = device->address();
            return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(address.gid.data()), address.gid.size()),
                                  address.lid, address.mtu, address.reads);
          },
          "device"_a)
      .def(
          "serve",
          [](RdmaTransport& self, const std::string& name, uint64_t owner, const AddressTuple& peer,
             const std::vector<EndTuple>& theirs) {
            RdmaAddress address = address_of(peer);
            auto device = self.device(name);
            if (!device) throw nb::value_error("no such device");
            Unlocked unlocked;
            return tuples_of(device->serve(owner, address, ends_of(theirs)));
          },
          "device"_a, "owner"_a, "peer"_a, "theirs"_a)
      .def(
          "retire",
          [](RdmaTransport& self, const std::string& name, uint64_t owner, uint32_t pair) {
            Unlocked unlocked;
            if (auto device = self.device(name)) device->retire(owner, pair);
          },
          "device"_a, "owner"_a, "pair"_a)
      .def(
          "num_served",
          [](const RdmaTransport& self, const std::string& name) {
            Unlocked unlocked;  // it waits while the device registers memory
            auto device = self.device(name);
            return device ? device->num_served() : 0;
          },
          "device"_a)
      .def(
          "grant",
          [](RdmaTransport& self, const std::string& name, const std::vector<uint64_t>& keys) {
            std::vector<GrantTuple> tuples;
            Unlocked unlocked;
            for (const Grant& grant : self.grant(name, keys))
              tuples.emplace_back(grant.key, grant.address, grant.size, grant.remote_key, grant.is_writable);
            return tuples;
          },
          "device"_a, "keys"_a)
      .def(
          "connect",
          [](RdmaTransport& self, const std::string& device, const std::string& their_device, uint64_t epoch,
             const std::vector<RemoteTuple>& remote,
             int num_lanes) { return self.connect(device, their_device, epoch, remote_of(remote), num_lanes); },
          "device"_a, "their_device"_a, "epoch"_a, "regions"_a, "num_lanes"_a)
      .def("close", &RdmaTransport::close, nb::call_guard<Unlocked>());
}

}  // namespace mooncake
