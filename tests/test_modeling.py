"""The models: saving and loading, ties, masks, caches, generation, outputs, resizing, checkpointing."""

import copy
import importlib.util
import math
import pickle

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, DynamicCache
from transformers.utils.generic import find_labels

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration, VanillaTrmModel
from hf_vanilla_trm.layers import sinusoids
from tests.conftest import spread_weights, tiny_config, tiny_model

TIES = [
    pytest.param({}, id="three-way tie"),
    pytest.param({"tie_word_embeddings": False}, id="output untied"),
    pytest.param({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}, id="separate vocabularies"),
    pytest.param(
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25, "tie_word_embeddings": False},
        id="separate vocabularies, output untied",
    ),
]


def closed_formula_count(d_model, d_ff, layers, vocab_size):
    """Parameters without attention biases and with the three-way tie, by the paper's shapes."""
    attention, norm = 4 * d_model**2, 2 * d_model
    feed_forward = 2 * d_model * d_ff + d_ff + d_model
    return vocab_size * d_model + layers * (3 * attention + 2 * feed_forward + 5 * norm)


@pytest.mark.parametrize(
    ("d_model", "d_ff", "layers", "vocab_size", "count"),
    [
        (128, 256, 4, 9712, 2_562_048),
        (256, 1024, 4, 9712, 9_846_784),
        (512, 2048, 6, 37000, 63_045_632),
        (1024, 4096, 6, 37000, 214_171_648),
    ],
)
def test_the_number_of_parameters_is_the_closed_formula(d_model, d_ff, layers, vocab_size, count):
    config = VanillaTrmConfig(
        d_model=d_model, d_ff=d_ff, encoder_layers=layers, decoder_layers=layers, vocab_size=vocab_size
    )
    with torch.device("meta"):
        model = VanillaTrmForConditionalGeneration(config)
    assert model.num_parameters() == count == closed_formula_count(d_model, d_ff, layers, vocab_size)


@pytest.mark.parametrize("changes", TIES)
def test_saved_tensors_come_back_bit_for_bit_by_class_and_by_auto_class(tmp_path, changes):
    model = VanillaTrmForConditionalGeneration(tiny_config(**changes, attention_bias=True, output_bias=True))
    with torch.no_grad():
        for constant, parameter in enumerate(model.parameters(), start=1):
            parameter.fill_(constant)
    model.save_pretrained(tmp_path)
    expected = model.state_dict()
    for loader in (VanillaTrmForConditionalGeneration, AutoModelForSeq2SeqLM):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is VanillaTrmForConditionalGeneration
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert loaded.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    bare = AutoModel.from_pretrained(tmp_path)
    assert type(bare) is VanillaTrmModel
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in bare.state_dict().items())


@pytest.mark.parametrize("changes", TIES)
def test_each_unique_tensor_is_saved_once_and_ties_survive(tmp_path, changes):
    model = tiny_model(**changes)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a dict
        assert not any("embed_positions" in name for name in file.keys())  # noqa: SIM118
    assert saved == sum(parameter.numel() for parameter in model.parameters()) == model.num_parameters()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    for candidate in (model, loaded):
        encoder, decoder = candidate.model.encoder.embed_tokens.weight, candidate.model.decoder.embed_tokens.weight
        assert (encoder is decoder) == changes.get("share_encoder_decoder_embeddings", True)
        assert (candidate.lm_head.weight is decoder) == changes.get("tie_word_embeddings", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_position_table_is_the_formula_after_every_way_of_loading(tmp_path, dtype):
    tiny_model().to(dtype).save_pretrained(tmp_path)
    with torch.device("meta"):
        on_meta = VanillaTrmForConditionalGeneration(tiny_config())
    on_meta.to_empty(device="cpu").init_weights()
    loaded = [
        VanillaTrmForConditionalGeneration.from_pretrained(tmp_path),
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype),
        AutoModelForSeq2SeqLM.from_config(tiny_config(), dtype=dtype),
        on_meta,
    ]
    expected = sinusoids(torch.arange(40), 16)
    for model in loaded:
        for stack in (model.model.encoder, model.model.decoder):
            torch.testing.assert_close(stack.embed_positions.table.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"d_model": 128, "d_ff": 256, "num_attention_heads": 4}, {}], ids=["tiny", "base"])
def test_a_fresh_model_predicts_close_to_uniformly(sizes):
    torch.manual_seed(0)
    config = VanillaTrmConfig(vocab_size=8000, dropout=0.0, **sizes)
    source, target = torch.randint(3, 8000, (2, 3, 19))
    loss = VanillaTrmForConditionalGeneration(config)(input_ids=source, labels=target).loss
    assert loss.item() == pytest.approx(math.log(8000), rel=0.1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_any_source_token_harms_neither_itself_nor_the_others(batch, implementation, dtype):
    model = tiny_model().to(dtype)
    model.set_attn_implementation(implementation)
    others = {name: tensor[[0, 2]] for name, tensor in batch.items()}
    expected = model(**others).logits
    batch["attention_mask"][1] = 0
    outputs = model(**batch)
    assert outputs.logits.isfinite().all()
    # bf16 sums in another order in a batch of another size.
    torch.testing.assert_close(
        outputs.logits[[0, 2]], expected, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.1
    )
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.slow  # flex attention is compiled
@torch.no_grad()  # it has no backward on a CPU
def test_eager_sdpa_and_flex_attention_give_the_same_logits(batch):
    model, logits = tiny_model(), []
    for implementation in ("eager", "sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)
        logits.append(model(**batch).logits)
    for others in logits[1:]:
        torch.testing.assert_close(others, logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash attention is installed")
def test_flash_attention_without_its_package_is_a_clear_error():
    with pytest.raises(ImportError, match="FlashAttention2"):
        tiny_model().set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_sentence_decodes_alike_alone_and_padded_beside_a_longer_one(batch, implementation):
    model = tiny_model(seed=7)
    model.set_attn_implementation(implementation)
    del batch["labels"]
    alone = {name: tensor[1:2, :4] for name, tensor in batch.items()}
    settings = {"max_new_tokens": 8, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    expected, together = model.generate(**alone, **settings), model.generate(**batch, **settings)
    length = expected.sequences.size(1)
    assert together.sequences[1, :length].tolist() == expected.sequences[0].tolist()
    torch.testing.assert_close(together.sequences_scores[1], expected.sequences_scores[0], rtol=1e-5, atol=1e-5)
    encoder_outputs = model.get_encoder()(**batch)
    given = model.generate(encoder_outputs=encoder_outputs, attention_mask=batch["attention_mask"], **settings)
    assert given.sequences.tolist() == together.sequences.tolist()


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 4}, {"do_sample": True}])
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_is_the_same_with_and_without_a_cache(batch, settings, cache_implementation):
    model = tiny_model(seed=7, decoder_layers=3)
    del batch["labels"]
    settings = settings | {"max_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True}
    results = []
    for cache in ({"cache_implementation": cache_implementation}, {"use_cache": False}):
        torch.manual_seed(0)
        results.append(model.generate(**batch, **settings, **cache))
    cached, uncached = results
    assert cached.sequences.tolist() == uncached.sequences.tolist()
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 2}])
def test_sources_and_outputs_may_be_longer_than_the_position_table(settings):
    model = tiny_model(seed=7, max_position_embeddings=6, eos_token_id=None)
    source = torch.randint(3, 20, (2, 11), generator=torch.Generator().manual_seed(0))
    longer_table = tiny_model(seed=7, max_position_embeddings=50, eos_token_id=None)
    settings = settings | {"max_new_tokens": 13, "do_sample": False}
    expected = longer_table.generate(source, **settings)
    assert expected.shape == (2, 14)
    assert model.generate(source, **settings).tolist() == expected.tolist()
    assert model.generate(source, use_cache=False, **settings).tolist() == expected.tolist()


def test_training_and_decoding_begin_with_the_start_token(batch):
    model = tiny_model(decoder_start_token_id=4)
    assert model.prepare_decoder_input_ids_from_labels(batch["labels"])[:, 0].tolist() == [4, 4, 4]
    assert model.generate(batch["input_ids"], max_new_tokens=2)[:, 0].tolist() == [4, 4, 4]


@pytest.mark.parametrize("name", ["decoder_start_token_id", "pad_token_id"])
def test_labels_without_a_start_or_padding_token_are_a_clear_error(batch, name):
    with pytest.raises(ValueError, match=rf"config\.{name} is None"):
        tiny_model(**{name: None})(**batch)


def test_decoding_without_an_encoder_output_is_a_clear_error():
    with pytest.raises(ValueError, match="needs encoder_hidden_states"):
        tiny_model().get_decoder()(input_ids=torch.tensor([[0, 5]]))


def test_a_cache_without_room_for_cross_attention_is_a_clear_error(batch):
    with pytest.raises(ValueError, match="must be an EncoderDecoderCache, not DynamicCache"):
        tiny_model()(batch["input_ids"], decoder_input_ids=torch.zeros(3, 1, dtype=torch.long), cache=DynamicCache())


@torch.no_grad()
def test_the_caches_old_name_is_understood_and_not_ignored(batch):
    model = tiny_model()
    first = torch.zeros(3, 1, dtype=torch.long)
    expected = model(batch["input_ids"], decoder_input_ids=first, use_cache=True)
    cached = copy.deepcopy(expected.cache)
    again = {"encoder_outputs": (expected.encoder_last_hidden_state,), "decoder_input_ids": first + 5}
    with pytest.warns(FutureWarning, match="past_key_values.* is deprecated"):
        old = model(**again, past_key_values=cached)
    torch.testing.assert_close(old.logits, model(**again, cache=expected.cache).logits)


def test_masked_training_equals_step_by_step_decoding(batch):
    model = tiny_model()
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    whole = model(**batch).logits
    del batch["labels"]
    cache = None
    for position in range(decoder_input_ids.size(1)):
        step = model(
            **batch, decoder_input_ids=decoder_input_ids[:, position : position + 1], cache=cache, use_cache=True
        )
        cache = step.cache
        torch.testing.assert_close(step.logits[:, 0], whole[:, position], rtol=1e-5, atol=1e-5)
    assert (len(cache.self_attention_cache), len(cache.cross_attention_cache)) == (2, 2)


def test_without_positions_the_encoder_is_permutation_equivariant(batch):
    encoder = tiny_model().get_encoder()
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    ids = batch["input_ids"][:1]
    with_positions = encoder(ids).last_hidden_state[:, order], encoder(ids[:, order]).last_hidden_state
    assert not torch.allclose(*with_positions, atol=1e-2)
    encoder.embed_positions.table.zero_()
    torch.testing.assert_close(
        encoder(ids).last_hidden_state[:, order], encoder(ids[:, order]).last_hidden_state, rtol=1e-5, atol=1e-5
    )


def test_every_sub_layer_ends_in_its_norm(batch):
    model = tiny_model(encoder_layers=3)
    with torch.no_grad():
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.feed_forward_layer_norm.weight.fill_(1)
            layer.feed_forward_layer_norm.bias.zero_()
    outputs = model(**batch, output_hidden_states=True)
    for states in (*outputs.encoder_hidden_states[1:], *outputs.decoder_hidden_states[1:]):
        torch.testing.assert_close(states.mean(-1), torch.zeros(states.shape[:-1]), rtol=0, atol=1e-5)
        torch.testing.assert_close(states.var(-1, unbiased=False), torch.ones(states.shape[:-1]), rtol=0, atol=1e-3)


def test_hidden_states_and_attentions_have_one_entry_a_layer_and_rows_that_sum_to_one(batch):
    model = tiny_model(decoder_layers=3)
    model.set_attn_implementation("eager")
    outputs = model(**batch, output_hidden_states=True, output_attentions=True)
    assert [states.shape for states in outputs.encoder_hidden_states] == [(3, 7, 16)] * 3
    assert [states.shape for states in outputs.decoder_hidden_states] == [(3, 5, 16)] * 4
    assert [weights.shape for weights in outputs.encoder_attentions] == [(3, 2, 7, 7)] * 2
    assert [weights.shape for weights in outputs.decoder_attentions] == [(3, 2, 5, 5)] * 3
    assert [weights.shape for weights in outputs.cross_attentions] == [(3, 2, 5, 7)] * 3
    for weights in outputs.cross_attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 5))
        assert weights[1, :, :, 4:].count_nonzero() == 0  # padding of the source
    for weights in outputs.decoder_attentions:
        assert weights.triu(1).count_nonzero() == 0  # the future
    torch.testing.assert_close(outputs.decoder_hidden_states[-1] @ model.lm_head.weight.T, outputs.logits)


def test_dropout_falls_on_every_sub_layer_output_and_on_the_embeddings():
    model = tiny_model(dropout=0.5)
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {
        name: 0.5
        for stack in ("encoder", "decoder")
        for name in (f"model.{stack}.dropout", *(f"model.{stack}.layers.{depth}.dropout" for depth in range(2)))
    }
    encoder = model.get_encoder().train()
    torch.manual_seed(0)
    seen = []
    encoder.dropout.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    for layer in encoder.layers:
        layer.dropout.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    encoder(torch.tensor([[5, 6, 2]]))
    assert len(seen) == 1 + 2 * 2  # the embeddings, and two sub-layers in each of two layers


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_leaves_loss_and_gradients_unchanged(batch, use_reentrant):
    model = tiny_model(dropout=0.1).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            assert model.is_activation_checkpointing
        torch.manual_seed(0)
        loss = model(**batch, label_smoothing=0.1).loss
        model.zero_grad()
        loss.backward()
        results.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("size", [23, 18])
def test_resizing_a_shared_vocabulary_resizes_everything_and_keeps_the_rest(tmp_path, batch, size, tie_word_embeddings):
    model = tiny_model(tie_word_embeddings=tie_word_embeddings, output_bias=True)
    kept, before = min(size, 20), copy.deepcopy(model.state_dict())
    model.resize_token_embeddings(size)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (size, size)
    assert (model.lm_head.weight is model.model.shared.weight) == tie_word_embeddings
    assert (
        model.model.shared.weight is model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight
    )
    for name in ("model.shared.weight", "lm_head.weight", "lm_head.bias"):
        assert torch.equal(model.state_dict()[name][:kept], before[name][:kept])
    batch = {name: tensor.clamp(max=17) for name, tensor in batch.items()}
    assert model(**batch).logits.shape == (3, 5, size)
    model.train()(**batch).loss.backward()
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_separate_vocabularies_are_resized_separately(batch, tie_word_embeddings):
    separate = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}
    model = tiny_model(**separate, tie_word_embeddings=tie_word_embeddings)
    model.resize_token_embeddings(22)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (22, 25)
    assert model(**batch).logits.shape == (3, 5, 25)
    model.resize_decoder_token_embeddings(27)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (22, 27)
    assert model(**batch).logits.shape == (3, 5, 27)
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) == tie_word_embeddings
    with pytest.raises(ValueError, match="call resize_token_embeddings instead"):
        tiny_model().resize_decoder_token_embeddings(27)


def test_the_trainer_takes_the_labels_and_nothing_else_for_labels():
    assert find_labels(VanillaTrmForConditionalGeneration) == ["labels"]


def test_a_vocabulary_resized_in_the_config_is_resized_on_both_sides(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(tmp_path, vocab_size=30))
    assert model.lm_head.weight.shape == model.model.decoder.embed_tokens.weight.shape == (30, 16)
    assert (model.lm_head.out_features, model.config.decoder_vocab_size) == (30, 30)
    model.save_pretrained(tmp_path)


def test_copies_and_pickles_compute_the_same(batch):
    model = tiny_model()
    expected = model(**batch).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch).logits, expected)
        assert twin.lm_head.weight is twin.model.shared.weight


def test_embeddings_may_be_given_in_place_of_ids(batch):
    model = tiny_model()
    expected = model(**batch).logits
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    embed = model.get_input_embeddings()
    given = model(
        inputs_embeds=embed(batch["input_ids"]),
        attention_mask=batch["attention_mask"],
        decoder_inputs_embeds=embed(decoder_input_ids),
    )
    torch.testing.assert_close(given.logits, expected)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(input_ids=batch["input_ids"], inputs_embeds=embed(batch["input_ids"]), labels=batch["labels"])


def test_a_tuple_is_returned_on_request_and_accepted_as_encoder_output(batch):
    model = tiny_model()
    expected = model(**batch)
    as_tuple = model(**batch, return_dict=False)
    torch.testing.assert_close(as_tuple[0], expected.loss)
    torch.testing.assert_close(as_tuple[1], expected.logits)
    encoder_outputs = (model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state,)
    given = model(encoder_outputs=encoder_outputs, attention_mask=batch["attention_mask"], labels=batch["labels"])
    torch.testing.assert_close(given.logits, expected.logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_masks_to_exactly_zero(batch, dtype):
    model = tiny_model().to(dtype)
    model.set_attn_implementation("eager")
    outputs = model(**batch, output_attentions=True)
    assert outputs.logits.isfinite().all()
    assert all(weights[1, :, :, 4:].count_nonzero() == 0 for weights in outputs.cross_attentions)
    assert all(weights.triu(1).count_nonzero() == 0 for weights in outputs.decoder_attentions)


def test_auto_config_knows_the_model_type():
    assert type(AutoConfig.for_model("vanilla_trm")) is VanillaTrmConfig
    assert spread_weights(AutoModel.from_config(tiny_config())).config.model_type == "vanilla_trm"
