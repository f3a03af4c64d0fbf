# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.structured_object_store``, by its name; see ``compat/objects/``."""

from mooncake.compat.objects.bundles import AUTO_PARALLEL_MIN_BYTES
from mooncake.compat.objects.bundles import for_keys as _config_for_grouped_keys
from mooncake.compat.objects.columns import encode_column as _encode_with_schema
from mooncake.compat.objects.manifest import decode as _decode_manifest
from mooncake.compat.objects.members import ScatteredBuffers as _MultiBufferPayload
from mooncake.compat.objects.nested_rows import MISSING, infer_structure
from mooncake.compat.objects.nested_rows import escape_key as _escape_key
from mooncake.compat.objects.row_codecs import choose_leaf_codec as _choose_leaf_codec
from mooncake.compat.objects.transfer import (
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    DEFAULT_BUNDLE_CHUNK_BYTES,
    BundleStore,
    BundleTransferPolicy,
    DataProtoRefLike,
    FieldSchema,
    MooncakeBundleTransfer,
    MooncakeDataProtoRef,
    RemoteBundleRef,
    StructuredFieldLocation,
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    export_dataproto_ref,
    export_ref,
    import_dataproto_ref,
    import_ref,
    is_dataproto_ref_handle,
    raw_destination,
    tensor_object_buffer,
)

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "MISSING",
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
    "_MultiBufferPayload",
    "_choose_leaf_codec",
    "_config_for_grouped_keys",
    "_decode_manifest",
    "_encode_with_schema",
    "_escape_key",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "infer_structure",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]
