"""Equal weights, equal logits: torch's own post-LN layers and MarianMT, with padding and causal masks."""

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_trm import VanillaTrmForConditionalGeneration
from hf_vanilla_trm.layers import sinusoids
from tests.conftest import spread_weights, tiny_config, tiny_model

CASES = [
    pytest.param({}, id="as in the paper"),
    pytest.param({"attention_bias": True, "decoder_layers": 3}, id="attention bias, unequal depths"),
]


def copy_linear(linear, weight, bias):
    """Fill `linear`, which has a bias, from ours, which may have none."""
    linear.weight.copy_(weight)
    linear.bias.zero_() if bias is None else linear.bias.copy_(bias)


def copy_attention(theirs, ours):
    """Copy our attention into a `torch.nn.MultiheadAttention`, which stacks the three projections."""
    for index, projection in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
        rows = slice(index * projection.out_features, (index + 1) * projection.out_features)
        theirs.in_proj_weight[rows] = projection.weight
        theirs.in_proj_bias[rows] = 0 if projection.bias is None else projection.bias
    copy_linear(theirs.out_proj, ours.out_proj.weight, ours.out_proj.bias)


@torch.no_grad()
def torch_layer(ours, config):
    """A torch layer with the weights of our encoder or decoder layer."""
    is_decoder = hasattr(ours, "cross_attn")
    layer_class = torch.nn.TransformerDecoderLayer if is_decoder else torch.nn.TransformerEncoderLayer
    layer = layer_class(
        config.d_model, config.num_attention_heads, config.d_ff, dropout=0.0, activation="relu", batch_first=True
    )
    copy_attention(layer.self_attn, ours.self_attn)
    norms = [ours.self_attn_layer_norm]
    if is_decoder:
        copy_attention(layer.multihead_attn, ours.cross_attn)
        norms.append(ours.cross_attn_layer_norm)
    norms.append(ours.feed_forward_layer_norm)
    for index, norm in enumerate(norms, start=1):
        getattr(layer, f"norm{index}").load_state_dict(norm.state_dict())
    layer.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
    layer.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    return layer.train()  # torch's inference fast path drops padded positions; there is no dropout


def torch_logits(model, batch, decoder_input_ids):
    """The logits of `model`'s weights computed by torch's layers and by arithmetic around them."""
    config, embedding = model.config, model.model.shared.weight

    def embed(ids):
        return embedding[ids] * config.d_model**0.5 + sinusoids(torch.arange(ids.size(1)), config.d_model).float()

    padding = batch["attention_mask"] == 0
    memory = embed(batch["input_ids"])
    for layer in model.model.encoder.layers:
        memory = torch_layer(layer, config)(memory, src_key_padding_mask=padding)
    output = embed(decoder_input_ids)
    future = torch.ones(output.size(1), output.size(1), dtype=torch.bool).triu(1)
    for layer in model.model.decoder.layers:
        output = torch_layer(layer, config)(output, memory, tgt_mask=future, memory_key_padding_mask=padding)
    return output @ embedding.T


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", CASES)
def test_logits_equal_those_of_torchs_post_ln_layers(batch, changes, implementation):
    model = tiny_model(**changes)
    model.set_attn_implementation(implementation)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    torch.testing.assert_close(
        model(**batch).logits, torch_logits(model, batch, decoder_input_ids), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def marian_twin(model):
    """A MarianMT model with our weights, and our positions for Marian's, which lay the features out otherwise."""
    config = model.config
    twin = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.num_attention_heads,
            decoder_attention_heads=config.num_attention_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            max_position_embeddings=config.max_position_embeddings,
            activation_function="relu",
            scale_embedding=True,
            dropout=0.0,
            pad_token_id=config.pad_token_id,
            eos_token_id=config.eos_token_id,
            forced_eos_token_id=None,
            decoder_start_token_id=config.decoder_start_token_id,
        )
    ).eval()
    ours, state = model.state_dict(), twin.state_dict()
    names = {
        "feed_forward_layer_norm": "final_layer_norm",
        "feed_forward.": "",
        "cross_attn": "encoder_attn",
        "lm_head.bias": "final_logits_bias",
    }
    for our_name, tensor in ours.items():
        their_name = our_name
        for ours_part, theirs_part in names.items():
            their_name = their_name.replace(ours_part, theirs_part)
        state[their_name].copy_(tensor)
    for name, tensor in state.items():
        if "proj.bias" in name and name.replace("encoder_attn", "cross_attn") not in ours:
            tensor.zero_()
    table = sinusoids(torch.arange(config.max_position_embeddings), config.d_model)
    for stack in (twin.model.encoder, twin.model.decoder):
        stack.embed_positions.weight.copy_(table)
    return twin


@pytest.mark.parametrize("changes", [*CASES, pytest.param({"output_bias": True}, id="output bias")])
def test_logits_equal_those_of_marian_with_our_positions(batch, changes):
    model = tiny_model(**changes)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch.pop("labels"))
    theirs = marian_twin(model)(**batch, decoder_input_ids=decoder_input_ids).logits
    torch.testing.assert_close(model(**batch, decoder_input_ids=decoder_input_ids).logits, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 4}, {"num_beams": 3, "length_penalty": 0.6}])
def test_generate_gives_the_tokens_that_marian_gives(batch, settings):
    model = tiny_model(seed=7)
    theirs = marian_twin(model)
    del batch["labels"]
    settings = settings | {"max_new_tokens": 9, "do_sample": False}
    ours = model.generate(**batch, **settings)
    assert ours.tolist() == theirs.generate(**batch, bad_words_ids=None, **settings).tolist()
    assert len(set(map(tuple, ours.tolist()))) > 1, "all rows alike would be a weak test"


def test_the_gradient_equals_that_of_torchs_post_ln_layers(batch):
    model = tiny_model()
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    real = batch["labels"] != -100
    logits = torch_logits(model, batch, shifted)
    # Only the embedding is shared with the torch twin, whose layers hold copies.
    expected = torch.nn.functional.cross_entropy(logits[real], batch["labels"][real])
    embedding = model.model.shared.weight
    (wanted,) = torch.autograd.grad(expected, embedding)
    (actual,) = torch.autograd.grad(model.train()(**batch).loss, embedding)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_without_spread_in_the_weights_the_comparison_would_be_weak():
    weights = spread_weights(VanillaTrmForConditionalGeneration(tiny_config())).model.shared.weight
    assert weights.std().item() == pytest.approx(0.3, rel=0.2)
