# SPDX-License-Identifier: Apache-2.0
"""The public names of the existing package's ``mooncake.structured_object_store``."""

from __future__ import annotations

from mooncake.compat.objects.chunk_writer import DEFAULT_CHUNK_BYTES
from mooncake.compat.objects.dataproto_ref import (
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    DataProtoRefLike,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
)
from mooncake.compat.objects.manifest import RemoteBundleRef
from mooncake.compat.objects.transfer import MooncakeBundleTransfer
from mooncake.compat.objects.values import (
    BundleStore,
    BundleTransferPolicy,
    FieldSchema,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    raw_destination,
    tensor_object_buffer,
)

DEFAULT_BUNDLE_CHUNK_BYTES = DEFAULT_CHUNK_BYTES
export_ref = export_dataproto_ref
import_ref = import_dataproto_ref

__all__ = [
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "BundleStore",
    "BundleTransferPolicy",
    "DataProtoRefLike",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]
