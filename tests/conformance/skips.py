"""The common tests that skip on our models, and why that is right; any other skip is a failure (see `conftest.py`)."""

import re

SKIPS = {
    "needs an accelerator, and runs where there is one": (
        "test_can_load_with_device_context_manager",
        "test_can_load_with_global_device_set",
        "test_cpu_offload",
        "test_disk_offload_bin",
        "test_disk_offload_safetensors",
        "test_flex_attention_with_grads",
        "test_model_parallelism",
        "test_sdpa_can_compile_dynamic",
        "test_sdpa_can_dispatch_on_flash",
        "test_torch_compile_for_training",
        "test_flash_attn_kernels_mps_inference_equivalence",
    ),
    "needs flash-attn, kernels, deepspeed or torchao, which run on accelerators": (
        *(f"test_flash_attn_{version}_can_dispatch_composite_models" for version in (2, 3, 4)),
        *(f"test_flash_attn_{version}_from_config" for version in (2, 3, 4)),
        *(f"test_flash_attn_{version}_inference_equivalence" for version in (2, 3, 4)),
        *(f"test_flash_attn_{version}_inference_equivalence_right_padding" for version in (2, 3, 4)),
        "test_flash_attn_2_can_compile_with_attention_mask_None_without_graph_break",
        "test_flash_attn_2_fp32_ln",
        "test_flash_attn_kernels_inference_equivalence",
        "test_kernels_can_load_without_crashing",
        "test_resize_embeddings_untied_with_deepspeed",
        "test_resize_embeddings_untied_with_deepspeed_multi_gpu",
        "test_resize_tokens_embeddings_with_deepspeed",
        "test_resize_tokens_embeddings_with_deepspeed_multi_gpu",
        "test_tp_generation_quantized",
    ),
    "the model has no experts": (
        "test_eager_matches_batched_and_grouped_inference",
        "test_fsdp2_expert_parallel_2d_vs_ddp",
        "test_fsdp2_expert_parallel_bf16_grads",
        "test_hsdp_grad_accumulation_vs_single_device_2_expert_parallel",
        "test_moe_models_record_router_logits",
        "test_moe_parallel_plans_shard_experts",
        "test_output_router_logits_from_config",
    ),
    "its positions are sinusoids without a limit: no rotary embedding, no table to resize": (
        "test_model_rope_scaling_frequencies",
        "test_model_rope_scaling_from_config",
        "test_model_rope_with_partial_rotation",
        "test_resize_position_vector_embeddings",
        "test_vision_axial_rope",
    ),
    "its attention has no sliding window": ("test_sliding_window_mask",),
    "it is one model with one config, not composed of several": (
        "test_attn_implementation_composite_models",
        "test_can_set_attention_dynamically_composite_model",
        "test_internal_model_config_and_subconfig_are_same",
        "test_sdpa_can_dispatch_composite_models",
    ),
    "its weights load under their own names, all in one precision": (
        "test_can_load_from_already_mapped_keys",
        "test_keep_in_fp32_modules",
        "test_keep_in_fp32_modules_exist",
        "test_keep_in_fp32_modules_strict_also_hardcode_fp32",
        "test_reverse_loading_mapping",
    ),
    "no class is a decoder alone": ("test_causal_lm_loss_honors_shift_labels",),
    "the encoder by itself has no cache and no decoder's loss": (
        "test_bc_cache_name_forward",
        "test_encoder_decoder_loss_no_double_shift",
    ),
    "looks for hidden_states, where an encoder-decoder has two kinds; tests/test_modeling.py chooses layers of both": (
        "test_can_capture_specific_layers_hidden_states",
    ),
    "takes the source's vocabulary for the target's; tests/test_modeling.py has them separate": (
        "test_inputs_embeds_matches_input_ids",
        "test_resize_embeddings_untied",
    ),
    "expects stacks of one depth; tests/test_modeling.py has stacks of two": (
        "test_attention_outputs",
        "test_hidden_states_output",
    ),
}


def reason_for(test_name):
    """Why the test may skip, or None; an entry without a parametrised test's number and label means them all."""
    names = {test_name, re.sub(r"_\d+(_\w+)?$", "", test_name)}
    return next((reason for reason, listed in SKIPS.items() if names & set(listed)), None)
