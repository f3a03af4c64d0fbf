# SPDX-License-Identifier: Apache-2.0
"""Every field of vLLM's configuration is a fact of a block's identity, or is known to change no values.

A new version of vLLM may bring fields that change what is computed. This test fails then, until each of
them is in one of the lists below, and if it counts, in ``cache_identity``.
"""

from __future__ import annotations

import dataclasses

import pytest

from mooncake.connectors.cache_identity import CACHE_OPTIONS, DRAFT_OPTIONS, ENCODER_OPTIONS, MODEL_OPTIONS

COUNTED = {
    "ModelConfig": {
        *MODEL_OPTIONS,
        *("hf_config", "hf_text_config", "hf_config_path", "hf_overrides", "config_format"),  # by its digest
        *("model", "model_weights", "revision"),  # by the digest of the weights
        *("max_model_len", "generation_config", "override_generation_config"),  # of some models
        *("disable_sliding_window", "multimodal_config"),
    },
    "LoadConfig": {"load_format", "model_loader_extra_config", "safetensors_load_strategy", "download_dir"},
    "CacheConfig": {
        *CACHE_OPTIONS,
        *("block_size", "kv_cache_layout", "prefix_caching_hash_algo"),
    },
    "MultiModalConfig": {*ENCODER_OPTIONS},
    "SpeculativeConfig": {
        *DRAFT_OPTIONS,
        *("draft_model_config", "draft_load_config"),  # by their own fields
        *("model", "revision", "code_revision", "quantization"),  # of the draft's configuration
        "attention_backend",  # by the description of each layer
    },
}
"""Fields that decide a block's identity, or that of an encoder's output."""

CHANGES_NO_VALUES = {
    "ModelConfig": {
        # Decide which tokens a prompt has; tokens are in the names of blocks, and so are embeddings.
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "enable_prompt_embeds"),
        # Use the output of the model.
        *("runner", "convert", "pooler_config", "return_sampling_mask", "max_logprobs", "logprobs_mode"),
        *(
            "use_fp64_gumbel",
            "enable_trace_replay",
            "logits_processors",
            "word_embeddings_untied_by_checkpoint",
        ),
        # The seed decides random weights, which are one engine's; code of the model is in its digest.
        *("seed", "trust_remote_code", "allow_deprecated_quantization", "disable_cascade_attn"),
        *("spec_target_max_model_len", "is_submodel_config"),
        # How it is run, reached and named.
        *("enforce_eager", "served_model_name", "hf_token", "io_processor_plugin", "renderer_num_workers"),
        *("allowed_local_media_path", "allowed_media_domains"),
        # Memory. Weights that are replaced after a sleep are reported by a reset of the caches.
        *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend"),
        *("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator"),
    },
    "LoadConfig": {
        *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "use_tqdm_on_load"),
        *("device", "pt_load_map_location"),
        "ignore_patterns",  # files that are not fetched from the hub
    },
    "CacheConfig": {
        # Size of the cache, and when its blocks are found.
        *("gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes", "num_gpu_blocks"),
        *("num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "enable_prefix_caching"),
        *("prefix_cache_retention_interval", "cache_hit_alignment_tokens", "user_specified_block_size"),
        *("_block_size_resolved", "effective_attention_block_size", "skip_page_size_padded"),
        *("kv_offloading_size", "kv_offloading_backend"),
        # Refused unless they are the size of a block.
        *("prefix_match_unit", "hash_block_size"),
        # Of models with other layers than full attention, which are refused; the model says which it has.
        *("is_attention_free", "sliding_window", "swa_bounded_replay", "mamba_page_size_padded"),
        *("mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
        *("enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm"),
        "use_kda_recoverssm",
    },
    "MultiModalConfig": {
        # Which items are accepted and how they become a processor's input, whose digest is in their names.
        *("language_model_only", "limit_per_prompt", "enable_mm_embeds", "media_io_kwargs"),
        *("interleave_mm_strings", "allow_missing_mm_embeddings", "mm_hasher_algorithm"),
        # Memory, caches and processes.
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "mm_encoder_only"),
        # Tensor parallelism, which is none of an encoder's facts, and a file that is written.
        *("mm_encoder_tp_mode", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
    },
    "SpeculativeConfig": {
        # How many tokens are proposed, and which of them are accepted.
        *("num_speculative_tokens", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"),
        *("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
        *("draft_sample_method", "dspark_draft_topk", "use_local_argmax_reduction"),
        # Without a draft model.
        *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
        *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
        "suffix_decoding_min_token_prob",
        # How it is run. The draft's length is in its own configuration where it counts.
        *("enforce_eager", "tensor_parallel_size", "moe_backend", "max_model_len"),
        *("disable_padded_drafter_batch", "disable_eagle_block_drop"),
        *("target_model_config", "target_parallel_config", "draft_parallel_config"),
    },
}


@pytest.mark.parametrize("name", COUNTED)
def test_each_field_of_vllms_configuration_counts_or_changes_no_values(name: str) -> None:
    import vllm.config

    fields = {field.name for field in dataclasses.fields(getattr(vllm.config, name))}
    counted, others = COUNTED[name], CHANGES_NO_VALUES[name]
    assert fields - counted - others == set(), "unknown: does it change values?"
    assert counted & others == set()
    assert others - fields == set(), "gone from vLLM"
    assert counted - fields == set(), "gone from vLLM, or another name"
