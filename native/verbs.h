// SPDX-License-Identifier: Apache-2.0
// The part of libibverbs' stable binary interface that the rdma transport uses, declared here so that the
// extension builds without its headers and runs without the library: load() opens it at run time, and
// must open the system's own, because the drivers of the devices are plugins of that one. The names are
// the library's without "ibv_". Posting and polling are inline functions in the original, which jump
// through the table in the context; so they are here. scripts/test-rdma compiles verbs_check.cpp, which
// compares every size and offset with the real header.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace mooncake::verbs {

struct Device;  // opaque
struct Channel;
struct CompletionQueue;
struct QueuePair;
struct Work;
struct WorkDone;

struct ContextOps {
  void* unused_0[11];
  int (*poll_cq)(CompletionQueue*, int, WorkDone*);
  int (*req_notify_cq)(CompletionQueue*, int solicited_only);
  void* unused_1[12];
  int (*post_send)(QueuePair*, Work*, Work** bad);
  void* unused_2[6];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct Domain {
  Context* context;
  uint32_t handle;
};

struct MemoryRegion {
  Context* context;
  Domain* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct Channel {
  Context* context;
  int fd;
  int refcnt;
};

struct CompletionQueue {
  Context* context;
  Channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;  // and more, which is not ours
};

struct QueuePair {
  Context* context;
  void* qp_context;
  Domain* pd;
  CompletionQueue* send_cq;
  CompletionQueue* recv_cq;
  void* srq;
  uint32_t handle;
  uint32_t qp_num;
  int state;
  int qp_type;  // and more, which is not ours
};

struct DeviceAttributes {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
  int atomic_cap;
  int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach;
  int max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay;
  uint8_t phys_port_cnt;
};

constexpr int kPortActive = 4;
constexpr uint8_t kEthernet = 2;

struct PortAttributes {
  int state;
  int max_mtu, active_mtu;  // 1 is 256 bytes, 5 is 4096
  int gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};

struct Gid {
  uint8_t raw[16];
};

struct Capacities {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

constexpr int kReliableConnection = 2;

struct QueuePairInit {
  void* qp_context;
  CompletionQueue* send_cq;
  CompletionQueue* recv_cq;
  void* srq;
  Capacities cap;
  int qp_type;
  int sq_sig_all;
};

struct GlobalRoute {
  alignas(8) Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};

struct AddressHandle {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

enum State : int { kReset, kInit, kReadyToReceive, kReadyToSend, kDraining, kSendError, kError };

enum AttributeMask : int {
  kMaskState = 1 << 0,
  kMaskAccess = 1 << 3,
  kMaskPkey = 1 << 4,
  kMaskPort = 1 << 5,
  kMaskAddress = 1 << 7,
  kMaskMtu = 1 << 8,
  kMaskTimeout = 1 << 9,
  kMaskRetry = 1 << 10,
  kMaskRnrRetry = 1 << 11,
  kMaskReceivePsn = 1 << 12,
  kMaskReads = 1 << 13,
  kMaskRnrTimer = 1 << 15,
  kMaskSendPsn = 1 << 16,
  kMaskDestinationReads = 1 << 17,
  kMaskDestination = 1 << 20,
};

struct QueuePairAttributes {
  int qp_state, cur_qp_state;
  int path_mtu;
  int path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  Capacities cap;
  AddressHandle ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout;
  uint8_t retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};

enum Access : int { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRelaxedOrdering = 1 << 20 };

enum Opcode : int { kRdmaWrite = 0, kRdmaRead = 4 };
constexpr unsigned kSignalled = 2;

struct Extent {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct Work {
  uint64_t wr_id;
  Work* next;
  Extent* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;
  struct {
    uint64_t remote_addr;
    uint32_t rkey;
  } rdma;
  uint64_t unused[9];
};

enum WorkStatus : int {
  kSuccess = 0,
  kLocalLength = 1,
  kLocalProtection = 4,
  kFlushed = 5,
  kLocalAccess = 8,
  kRemoteInvalidRequest = 9,
  kRemoteAccess = 10,
  kRemoteOperation = 11,
  kRetriesExceeded = 12,
};

struct WorkDone {
  uint64_t wr_id;
  int status;
  int opcode;
  uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
  unsigned wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct Library {
  Device** (*get_device_list)(int* count);
  void (*free_device_list)(Device**);
  const char* (*get_device_name)(Device*);
  Context* (*open_device)(Device*);
  int (*close_device)(Context*);
  int (*query_device)(Context*, DeviceAttributes*);
  int (*query_port)(Context*, uint8_t port, PortAttributes*);
  int (*query_gid)(Context*, uint8_t port, int index, Gid*);
  Domain* (*alloc_pd)(Context*);
  int (*dealloc_pd)(Domain*);
  MemoryRegion* (*reg_mr)(Domain*, void* address, size_t length, int access);
  int (*dereg_mr)(MemoryRegion*);
  Channel* (*create_comp_channel)(Context*);
  int (*destroy_comp_channel)(Channel*);
  CompletionQueue* (*create_cq)(Context*, int entries, void* tag, Channel*, int vector);
  int (*destroy_cq)(CompletionQueue*);
  int (*get_cq_event)(Channel*, CompletionQueue**, void** tag);
  void (*ack_cq_events)(CompletionQueue*, unsigned count);
  QueuePair* (*create_qp)(Domain*, QueuePairInit*);
  int (*modify_qp)(QueuePair*, QueuePairAttributes*, int mask);
  int (*destroy_qp)(QueuePair*);
  // Since release 34 of the library; null before.
  MemoryRegion* (*reg_dmabuf_mr)(Domain*, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
};

// The library, opened once per process; null, and why, when this machine has none.
const Library* load(std::string& error);

inline int poll_cq(CompletionQueue* queue, int count, WorkDone* done) {
  return queue->context->ops.poll_cq(queue, count, done);
}
inline int arm(CompletionQueue* queue) { return queue->context->ops.req_notify_cq(queue, 0); }
inline int post_send(QueuePair* pair, Work* work, Work** bad) { return pair->context->ops.post_send(pair, work, bad); }

}  // namespace mooncake::verbs
