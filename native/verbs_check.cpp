// SPDX-License-Identifier: Apache-2.0
// Compares verbs.h with the header of libibverbs-dev. Compiled by scripts/test-rdma, never linked.
#include <infiniband/verbs.h>

#include "verbs.h"

namespace ours = mooncake::verbs;

#define SAME_SIZE(mine, theirs) static_assert(sizeof(ours::mine) == sizeof(theirs), #theirs)
#define SAME_PLACE(mine, field, theirs, theirs_field)                                \
  static_assert(offsetof(ours::mine, field) == offsetof(theirs, theirs_field) &&     \
                    sizeof(ours::mine::field) == sizeof(((theirs*)0)->theirs_field), \
                #theirs "." #theirs_field)
#define SAME(mine, theirs, field) SAME_PLACE(mine, field, theirs, field)
#define SAME_VALUE(mine, theirs) static_assert(static_cast<long>(ours::mine) == static_cast<long>(theirs), #theirs)

SAME_SIZE(ContextOps, ibv_context_ops);
SAME(ContextOps, ibv_context_ops, poll_cq);
SAME(ContextOps, ibv_context_ops, req_notify_cq);
SAME(ContextOps, ibv_context_ops, post_send);
SAME_SIZE(Context, ibv_context);
SAME(Context, ibv_context, ops);
SAME(Context, ibv_context, async_fd);
SAME_SIZE(Domain, ibv_pd);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME(MemoryRegion, ibv_mr, lkey);
SAME(MemoryRegion, ibv_mr, rkey);
SAME_SIZE(Channel, ibv_comp_channel);
SAME(Channel, ibv_comp_channel, fd);
SAME(CompletionQueue, ibv_cq, context);
SAME(CompletionQueue, ibv_cq, cqe);
SAME(QueuePair, ibv_qp, context);
SAME(QueuePair, ibv_qp, qp_num);
SAME_SIZE(DeviceAttributes, ibv_device_attr);
SAME(DeviceAttributes, ibv_device_attr, max_qp_wr);
SAME(DeviceAttributes, ibv_device_attr, max_qp_rd_atom);
SAME(DeviceAttributes, ibv_device_attr, max_qp_init_rd_atom);
SAME(DeviceAttributes, ibv_device_attr, phys_port_cnt);
SAME_SIZE(PortAttributes, ibv_port_attr);
SAME(PortAttributes, ibv_port_attr, active_mtu);
SAME(PortAttributes, ibv_port_attr, max_msg_sz);
SAME(PortAttributes, ibv_port_attr, lid);
SAME(PortAttributes, ibv_port_attr, link_layer);
SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(Capacities, ibv_qp_cap);
SAME_SIZE(QueuePairInit, ibv_qp_init_attr);
SAME(QueuePairInit, ibv_qp_init_attr, cap);
SAME(QueuePairInit, ibv_qp_init_attr, qp_type);
SAME_SIZE(GlobalRoute, ibv_global_route);
SAME(GlobalRoute, ibv_global_route, sgid_index);
SAME_SIZE(AddressHandle, ibv_ah_attr);
SAME(AddressHandle, ibv_ah_attr, dlid);
SAME(AddressHandle, ibv_ah_attr, port_num);
SAME_SIZE(QueuePairAttributes, ibv_qp_attr);
SAME(QueuePairAttributes, ibv_qp_attr, dest_qp_num);
SAME(QueuePairAttributes, ibv_qp_attr, ah_attr);
SAME(QueuePairAttributes, ibv_qp_attr, pkey_index);
SAME(QueuePairAttributes, ibv_qp_attr, max_dest_rd_atomic);
SAME(QueuePairAttributes, ibv_qp_attr, retry_cnt);
SAME(QueuePairAttributes, ibv_qp_attr, rate_limit);
SAME_SIZE(Extent, ibv_sge);
SAME_SIZE(Work, ibv_send_wr);
SAME(Work, ibv_send_wr, sg_list);
SAME(Work, ibv_send_wr, send_flags);
SAME_PLACE(Work, rdma.remote_addr, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(Work, rdma.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(WorkDone, ibv_wc);
SAME(WorkDone, ibv_wc, status);
SAME(WorkDone, ibv_wc, qp_num);

SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(kReliableConnection, IBV_QPT_RC);
SAME_VALUE(kInit, IBV_QPS_INIT);
SAME_VALUE(kReadyToReceive, IBV_QPS_RTR);
SAME_VALUE(kReadyToSend, IBV_QPS_RTS);
SAME_VALUE(kError, IBV_QPS_ERR);
SAME_VALUE(kMaskState, IBV_QP_STATE);
SAME_VALUE(kMaskAccess, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kMaskPkey, IBV_QP_PKEY_INDEX);
SAME_VALUE(kMaskPort, IBV_QP_PORT);
SAME_VALUE(kMaskAddress, IBV_QP_AV);
SAME_VALUE(kMaskMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kMaskTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kMaskRetry, IBV_QP_RETRY_CNT);
SAME_VALUE(kMaskRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kMaskReceivePsn, IBV_QP_RQ_PSN);
SAME_VALUE(kMaskReads, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kMaskRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kMaskSendPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kMaskDestinationReads, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kMaskDestination, IBV_QP_DEST_QPN);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kRemoteRead, IBV_ACCESS_REMOTE_READ);
SAME_VALUE(kRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING);
SAME_VALUE(kRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kRdmaRead, IBV_WR_RDMA_READ);
SAME_VALUE(kSignalled, IBV_SEND_SIGNALED);
SAME_VALUE(kSuccess, IBV_WC_SUCCESS);
SAME_VALUE(kLocalLength, IBV_WC_LOC_LEN_ERR);
SAME_VALUE(kLocalProtection, IBV_WC_LOC_PROT_ERR);
SAME_VALUE(kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kLocalAccess, IBV_WC_LOC_ACCESS_ERR);
SAME_VALUE(kRemoteInvalidRequest, IBV_WC_REM_INV_REQ_ERR);
SAME_VALUE(kRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(kRemoteOperation, IBV_WC_REM_OP_ERR);
SAME_VALUE(kRetriesExceeded, IBV_WC_RETRY_EXC_ERR);
