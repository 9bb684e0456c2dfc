"""The model among the tools around it: offloading, precisions, compilation, export, generation's modes, adapters, and
its parts by themselves.
"""

import copy
import logging
import math
import warnings

import accelerate
import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    EncoderDecoderCache,
    StaticCache,
)
from transformers.integrations.executorch import Seq2SeqLMExportableModule

from hf_vanilla_trm import VanillaTrmDecoder, VanillaTrmEncoder, VanillaTrmForConditionalGeneration
from tests.conftest import tiny_config, tiny_model
from tests.memorised import memorised, one_source, three_sources, without_labels

SMALLER = {"d_model": 12, "d_ff": 20, "num_attention_heads": 3, "encoder_layers": 1, "decoder_layers": 1}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}
TIES = [
    pytest.param({}, id="three-way tie"),
    pytest.param({"tie_word_embeddings": False}, id="output untied"),
    pytest.param(SEPARATE, id="separate vocabularies"),
    pytest.param(SEPARATE | {"tie_word_embeddings": False}, id="separate vocabularies, output untied"),
]
SHARING = [
    pytest.param({"parameter_sharing": "all", "embedding_size": 12}, id="all shared, factorised"),
    pytest.param({"parameter_sharing": "attention"}, id="attention shared"),
    pytest.param({"parameter_sharing": "ffn"} | SEPARATE, id="ffn shared, separate vocabularies"),
]
VARIANTS = [*TIES, *SHARING]
EXTREMES = [TIES[0], TIES[-1], *SHARING[:2]]
HALVES = [torch.bfloat16, torch.float16]


def random_batch(batch_size, source_length, target_length):
    """Tokens with some padding on both sides."""
    generator = torch.Generator().manual_seed(source_length)
    input_ids = torch.randint(3, 20, (batch_size, source_length), generator=generator)
    labels = torch.randint(3, 20, (batch_size, target_length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, -2:], input_ids[1, -2:], labels[0, -1:] = 0, 1, -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@torch.no_grad()
def behaviour(model, batch):
    """What users see of a model: logits, loss, the loss in training mode, and translations."""
    outputs = model.eval()(**batch)
    translations = model.generate(**without_labels(batch), max_new_tokens=6, num_beams=3)
    training_loss = model.train()(**batch, label_smoothing=0.1).loss
    model.eval()
    return {
        "logits": outputs.logits,
        "loss": outputs.loss,
        "loss in training": training_loss,
        "translations": translations,
    }


def on_disk(model):
    """Names of the parameters that are not in memory."""
    return {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}


# Placement and offloading


@pytest.mark.parametrize("share_in_memory", [0, 0.6, 0.8])
@pytest.mark.parametrize("changes", VARIANTS)
def test_a_model_of_which_a_part_stays_on_disk_behaves_like_a_whole_one(tmp_path, batch, changes, share_in_memory):
    whole = tiny_model(seed=7, decoder_layers=3, **changes)
    whole.save_pretrained(tmp_path / "model")
    memory = {"cpu": int(share_in_memory * 4 * whole.num_parameters())}
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory=memory, offload_folder=tmp_path / "offload"
    )
    assert set(model.hf_device_map.values()) == ({"cpu", "disk"} if share_in_memory else {"disk"})
    assert on_disk(model)
    torch.testing.assert_close(behaviour(model, batch), behaviour(whole, batch))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


IN_MEMORY = ("embed_tokens", "embed_projection", "embed_positions", "lm_head_projection")


@pytest.mark.parametrize("offloaded", ["encoder", "decoder"])
@pytest.mark.parametrize("changes", VARIANTS)
def test_the_layers_of_one_stack_may_be_sent_to_disk_by_hand(tmp_path, batch, changes, offloaded):
    whole = tiny_model(seed=7, **changes)
    whole.save_pretrained(tmp_path / "model")
    device_map = {name: "cpu" for name, _ in whole.named_modules() if name.endswith(IN_MEMORY)}
    device_map |= {f"model.{stack}.dropout": "cpu" for stack in ("encoder", "decoder")}
    device_map |= {f"model.{stack}.layers": "cpu" for stack in ("encoder", "decoder")}
    device_map |= {"model.shared": "cpu", "lm_head": "cpu", f"model.{offloaded}.layers": "disk"}
    if not whole.config.share_encoder_decoder_embeddings:
        del device_map["model.shared"]
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    names = {name for name, _ in whole.named_parameters() if name.startswith(f"model.{offloaded}.layers")}
    assert on_disk(model) == names
    torch.testing.assert_close(behaviour(model, batch), behaviour(whole, batch))


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("changes", VARIANTS)
def test_accelerates_own_offloading_changes_nothing(tmp_path, batch, changes, where):
    expected = behaviour(tiny_model(seed=7, **changes), batch)
    model = tiny_model(seed=7, **changes)
    if where == "cpu":
        model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert len(on_disk(model)) == len(list(model.parameters()))
    torch.testing.assert_close(behaviour(model, batch), expected)


def test_where_there_is_room_the_automatic_device_map_leaves_a_model_that_trains(tmp_path, batch):
    whole = tiny_model()
    whole.save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": "1GB"})
    assert not on_disk(model)
    for candidate in (whole, model):
        candidate.train()(**batch).loss.backward()
    for expected, parameter in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


# Precisions


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("placement", ["in memory", "partly on disk"])
@pytest.mark.parametrize("changes", VARIANTS)
def test_loading_in_half_precision_equals_loading_and_casting(tmp_path, batch, changes, placement, dtype):
    whole = tiny_model(seed=7, **changes)
    whole.save_pretrained(tmp_path / "model")
    settings = {"dtype": dtype}
    if placement == "partly on disk":
        memory = {"cpu": int(0.6 * 2 * whole.num_parameters())}
        settings |= {"device_map": "auto", "max_memory": memory, "offload_folder": tmp_path / "offload"}
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", **settings)
    assert bool(on_disk(model)) == (placement == "partly on disk")
    assert {parameter.dtype for parameter in model.parameters()} == {model.dtype} == {dtype}
    full_loss = whole(**batch).loss
    actual, expected = behaviour(model, batch), behaviour(whole.to(dtype), batch)
    # Logits of an output that is on disk are rounded at another place than those that are never held as a whole.
    torch.testing.assert_close(actual.pop("loss in training"), expected.pop("loss in training"), rtol=1e-3, atol=0)
    torch.testing.assert_close(actual, expected)
    assert actual["loss"].dtype == torch.float32
    torch.testing.assert_close(actual["loss"], full_loss, rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_checkpoint_loads_in_the_precision_in_which_it_was_saved_unless_told_otherwise(tmp_path, dtype):
    saved = tiny_model().to(dtype)
    saved.save_pretrained(tmp_path)
    expected = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    for settings, loaded_dtype in (({}, dtype), ({"dtype": "auto"}, dtype), ({"dtype": torch.float32}, torch.float32)):
        model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **settings)
        assert (model.dtype, model.config.dtype) == (loaded_dtype, loaded_dtype)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name].to(loaded_dtype))
    assert AutoModel.from_pretrained(tmp_path).dtype == dtype


@pytest.mark.parametrize("way", ["from_config", "default dtype"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
@pytest.mark.parametrize("changes", VARIANTS)
def test_a_fresh_model_is_built_in_every_precision_and_trains(batch, changes, dtype, way):
    torch.manual_seed(0)
    if way == "from_config":
        model = AutoModelForSeq2SeqLM.from_config(tiny_config(**changes), dtype=dtype)
    else:
        torch.set_default_dtype(dtype)
        try:
            model = VanillaTrmForConditionalGeneration(tiny_config(**changes))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.get_default_dtype() == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.eval()(**batch).logits.dtype == dtype
    loss = model.train()(**batch, label_smoothing=0.1).loss
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(math.log(model.config.decoder_vocab_size), rel=0.05)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())


@pytest.mark.parametrize("changes", VARIANTS)
def test_on_the_meta_device_a_model_computes_shapes_and_holds_no_memory(batch, changes):
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(tiny_config(**changes))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    source, labels = batch["input_ids"].to("meta"), batch["labels"].to("meta")
    assert model.eval()(source, labels=labels).logits.shape == (3, 5, changes.get("decoder_vocab_size", 20))
    assert model.train()(source, labels=labels).loss.shape == ()


# Compilation


def assert_trains_alike(model, compiled, batch):
    """The same loss and gradients from a model and from its compiled form, which has the same parameters."""
    results = []
    for candidate in (model, compiled):
        model.zero_grad()
        loss = candidate(**batch, label_smoothing=0.1).loss
        loss.backward()
        results.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiled_training_equals_eager_at_every_length_with_few_graphs():
    torch._dynamo.reset()
    model = tiny_model().train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for sizes in ((3, 7, 5), (4, 9, 6), (5, 11, 8), (2, 39, 33), (3, 7, 5)):
        assert_trains_alike(model, compiled, random_batch(*sizes))
    assert counter.frame_count <= 2  # the first sizes, then sizes in general
    for sizes in ((4, 43, 45), (2, 51, 61)):  # longer than the position table
        assert_trains_alike(model, compiled, random_batch(*sizes))
    assert counter.frame_count <= 3


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_forward_equals_eager_in_sizes_for_which_eager_has_two_ways_with_few_graphs():
    """From some size on, `linear` multiplies by oneDNN: what is compiled must not be bound to either side of it."""
    torch._dynamo.reset()
    model = tiny_model(d_model=64, d_ff=256, encoder_layers=3, decoder_layers=3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for sizes in ((3, 7, 5), (4, 9, 6), (24, 39, 33), (2, 17, 30), (11, 25, 12)):
        batch = random_batch(*sizes)
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2  # the first sizes, then sizes in general


@pytest.mark.slow  # it generates C++ and compiles that
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # used by the compiler
def test_training_code_generated_by_the_default_compiler_equals_eager():
    torch._dynamo.reset()
    model = tiny_model(encoder_layers=1, decoder_layers=1).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for sizes in ((3, 7, 5), (4, 9, 6)):
        assert_trains_alike(model, compiled, random_batch(*sizes))


@pytest.mark.slow
@pytest.mark.parametrize("changes", EXTREMES)
@torch.no_grad()
def test_a_compiled_decoder_step_with_a_static_cache_decodes_like_generate(changes):
    torch._dynamo.reset()
    model, source = memorised(**changes), without_labels(three_sources())
    expected = model.generate(**source, max_new_tokens=9, do_sample=False)
    encoder, decoder = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    encoded = torch.compile(model.get_encoder(), fullgraph=True, backend=encoder)(**source)
    step = torch.compile(model, fullgraph=True, backend=decoder)
    caches = (StaticCache(config=model.config, max_cache_len=length) for length in (9, 30))
    cache, tokens = EncoderDecoderCache(*caches), torch.zeros(3, 1, dtype=torch.long)
    for _ in range(9):
        logits = step(
            encoder_outputs=encoded,
            attention_mask=source["attention_mask"],
            decoder_input_ids=tokens[:, -1:].contiguous(),
            cache=cache,
            use_cache=True,
        ).logits
        tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
    assert tokens.tolist() == expected.tolist()
    assert encoder.frame_count == 1
    assert decoder.frame_count == 2  # the step that fills the cross-attention's cache, and all others


@pytest.mark.slow
def test_generate_compiles_its_decoder_step_once_for_all_sentences():
    torch._dynamo.reset()
    model, source = memorised(), without_labels(three_sources())
    counter = CompileCounterWithBackend("aot_eager")

    def backend(graph, inputs):  # generate copies its settings: it would count in a copy of the counter
        return counter(graph, inputs)

    compile_config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compile_config._compile_all_devices = True  # by default generate compiles on accelerators only
    settings = {"max_new_tokens": 9, "do_sample": False}
    for row in (0, 2):
        sentences = {name: tensor[[row, 1]] for name, tensor in source.items()}
        expected = model.generate(**sentences, **settings)
        actual = model.generate(**sentences, **settings, cache_implementation="static", compile_config=compile_config)
        assert actual.tolist() == expected.tolist()
    assert 1 <= counter.frame_count <= 2


# Export


class LastHiddenState(nn.Module):
    """An encoder that takes and returns tensors."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids, attention_mask):
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class NextTokens(nn.Module):
    """A decoder with its head, without a cache, that takes and returns tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, decoder_input_ids, encoder_hidden_states, attention_mask):
        return self.model(
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=(encoder_hidden_states,),
            attention_mask=attention_mask,
            use_cache=False,
        ).logits


def exported_and_reloaded(module, inputs, path, strict):
    """A program that takes any batch and lengths, after a round trip through a file."""
    dynamic_shapes = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for _ in inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=strict)
    torch.export.save(program, path)
    return torch.export.load(path).module()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "strict"),
    [({}, False), (SEPARATE | {"tie_word_embeddings": False}, True)],
    ids=["tied", "separate and untied, strict"],
)
@torch.no_grad()
def test_exported_encoder_and_decoder_run_at_other_batch_sizes_and_lengths(tmp_path, batch, changes, strict):
    model = tiny_model(**changes)
    encoder, decoder = LastHiddenState(model.get_encoder()), NextTokens(model)
    source = (batch["input_ids"], batch["attention_mask"])
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    exported_encoder = exported_and_reloaded(encoder, source, tmp_path / "encoder.pt2", strict)
    exported_decoder = exported_and_reloaded(
        decoder, (target, encoder(*source), source[1]), tmp_path / "decoder.pt2", strict
    )
    for sizes in ((2, 3, 4), (5, 9, 13), (4, 30, 39)):
        other = random_batch(*sizes)
        mask, target = other["attention_mask"], model.prepare_decoder_input_ids_from_labels(other["labels"])
        encoded = encoder(other["input_ids"], mask)
        torch.testing.assert_close(exported_encoder(other["input_ids"], mask), encoded)
        torch.testing.assert_close(exported_decoder(target, encoded, mask), decoder(target, encoded, mask))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
# Not with factorised embeddings: transformers' wrapper knows of nothing between decoder and output.
@pytest.mark.parametrize("changes", [TIES[0], TIES[-1], SHARING[1]])
def test_an_exported_decoder_step_with_a_static_cache_decodes_sources_of_any_length(changes):
    model, batch = memorised(**changes), three_sources()
    exported = Seq2SeqLMExportableModule(model, max_hidden_seq_length=40, max_cache_length=12).export()
    for row in range(3):
        source = one_source(batch, row)
        expected = model.generate(**source, max_new_tokens=10, do_sample=False)[0].tolist()
        assert exported.generate(source["input_ids"], max_new_tokens=11) == expected


# Generation's modes


@pytest.fixture
def settings_beside_a_generation_config():
    """The library's assisted decoding itself calls generate in a way that the library deprecates."""

    def is_not_ours(record):
        return "Passing `generation_config` together" not in record.getMessage()

    logger = logging.getLogger("transformers.generation.utils")
    logger.addFilter(is_not_ours)
    yield
    logger.removeFilter(is_not_ours)


@pytest.mark.parametrize(
    ("assistant", "changes"),
    [
        ("the model itself", {}),
        ("a smaller model", {}),
        ("a smaller model", SEPARATE | {"tie_word_embeddings": False}),
        ("its first layer", {}),
        ("earlier n-grams", {}),  # with separate vocabularies transformers takes the source's size for the target's
    ],
)
@pytest.mark.usefixtures("settings_beside_a_generation_config")
def test_assisted_greedy_decoding_gives_the_same_tokens_in_fewer_steps(changes, assistant):
    model, batch = memorised(**changes), three_sources()
    if assistant == "earlier n-grams":
        model = tiny_model(seed=7, **changes)  # it repeats itself
    settings = {
        "the model itself": {"assistant_model": copy.deepcopy(model)},
        "a smaller model": {"assistant_model": memorised(**SMALLER, **changes)},
        "its first layer": {"assistant_early_exit": 1},
        "earlier n-grams": {"prompt_lookup_num_tokens": 3},
    }[assistant]
    recorded = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    lengths = []  # of the decoder's inputs, step by step
    model.lm_head.register_forward_hook(lambda _module, inputs, _output: lengths.append(inputs[0].size(1)))
    for row in range(3):
        source = one_source(batch, row)
        lengths.clear()
        expected = model.generate(**source, **recorded)
        alone = lengths.copy()
        lengths.clear()
        actual = model.generate(**source, **recorded, **settings)
        assert actual.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
        assert max(alone) == 1
        assert max(lengths) > 1  # several proposed tokens are checked in one step
        if assistant != "its first layer":  # which was never trained to predict, and calls the same head
            assert len(lengths) < len(alone)


@pytest.mark.usefixtures("settings_beside_a_generation_config")
@pytest.mark.parametrize("assisted", [False, True])
def test_sampling_repeats_under_a_seed_and_stays_within_the_models_best_tokens(batch, assisted):
    model, source = tiny_model(seed=7, eos_token_id=None), without_labels(batch)
    settings = {"do_sample": True, "top_k": 3, "max_new_tokens": 12}
    if assisted:
        source = one_source(batch, 0)
        settings["assistant_model"] = tiny_model(seed=5, eos_token_id=None, **SMALLER)
    else:
        settings["num_return_sequences"] = 4
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(model.generate(**source, **settings))
    first, again, other = samples
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == ((1, 13) if assisted else (12, 13))
    source = {name: tensor.repeat_interleave(first.size(0) // tensor.size(0), dim=0) for name, tensor in source.items()}
    best = model(**source, decoder_input_ids=first[:, :-1]).logits.topk(3).indices
    assert (best == first[:, 1:, None]).any(-1).all()
    assert not (best[..., 0] == first[:, 1:]).all(), "these would be the greedy tokens"


def test_sampled_tokens_are_as_frequent_as_the_model_says(batch):
    model, draws = tiny_model(seed=7), 20_000
    source = {name: tensor[:1] for name, tensor in without_labels(batch).items()}
    temperature = 1.5
    probabilities = (model(**source, decoder_input_ids=torch.tensor([[0]])).logits[0, 0] / temperature).softmax(-1)
    torch.manual_seed(0)
    sampled = model.generate(
        **source, do_sample=True, top_k=0, temperature=temperature, max_new_tokens=1, num_return_sequences=draws
    )
    counts = sampled[:, 1].bincount(minlength=20)
    deviation = (draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - draws * probabilities).abs() < 5 * deviation + 1).all()


@pytest.mark.parametrize("batch_size", [3, 4])
@pytest.mark.parametrize("changes", VARIANTS)
def test_the_scores_of_the_chosen_tokens_add_up_to_the_scores_of_the_translations(changes, batch_size):
    model = tiny_model(seed=7, **changes)
    source = without_labels(random_batch(batch_size, 7, 5))
    recorded = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    beams = model.generate(**source, **recorded, num_beams=3, length_penalty=0.0)
    scores = model.compute_transition_scores(beams.sequences, beams.scores, beams.beam_indices)
    torch.testing.assert_close(scores.sum(-1), beams.sequences_scores)
    greedy = model.generate(**source, **recorded, do_sample=False)
    scores = model.compute_transition_scores(greedy.sequences, greedy.scores, normalize_logits=True)
    logits = model(**source, decoder_input_ids=greedy.sequences[:, :-1]).logits
    chosen = logits.log_softmax(-1).gather(2, greedy.sequences[:, 1:, None])[..., 0]
    unfinished = (greedy.sequences[:, 1:] == 2).cumsum(-1).cumsum(-1) < 2  # up to and with EOS
    torch.testing.assert_close(scores[unfinished], chosen[unfinished], rtol=1e-4, atol=1e-4)


# Adapters

# PEFT asks for it by its old name.
OLD_CHECKPOINTING_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def lora(model, **settings):
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 6} | settings
    return get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, **settings))


def fine_tune(model, batch, updates=20):
    """Losses of a few updates of what is trainable."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(updates):
        loss = model.train()(**batch, label_smoothing=0.1).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@OLD_CHECKPOINTING_NAME
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("changes", VARIANTS)
def test_an_adapter_trains_alone_is_saved_reloaded_and_merged(tmp_path, batch, changes, checkpointing):
    tiny_model(seed=7, dropout=0.1, **changes).save_pretrained(tmp_path / "base")
    base = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    before, logits = copy.deepcopy(base.state_dict()), base(**batch).logits
    model = lora(base)
    torch.testing.assert_close(model.eval()(**batch).logits, logits)  # B of a new adapter is zero
    if checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    losses = fine_tune(model, batch)
    assert losses[-1] < 0.95 * losses[0]
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"default"}
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.count_nonzero()}
    # q_proj and v_proj of two encoder layers, and twice those of two decoder layers, unless they share
    layers = 1 if changes.get("parameter_sharing") in ("attention", "all") else 2
    adapted = 2 * (layers + 2 * layers)
    assert len(trained) == 2 * adapted
    tensors = {name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items()}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())

    expected = model(**batch).logits
    assert not torch.allclose(expected, logits, atol=0.1)
    model.save_pretrained(tmp_path / "adapter")
    fresh = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    for reloaded in (fresh, AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "adapter")):
        torch.testing.assert_close(reloaded.eval()(**batch).logits, expected)
    translations = model.generate(**without_labels(batch), max_new_tokens=6, num_beams=3)
    assert fresh.generate(**without_labels(batch), max_new_tokens=6, num_beams=3).tolist() == translations.tolist()

    merged = fresh.merge_and_unload()
    assert type(merged) is VanillaTrmForConditionalGeneration
    assert merged.state_dict().keys() == before.keys()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(loaded(**batch).logits, merged(**batch).logits, rtol=0, atol=0)
    assert loaded.num_parameters() == sum(p.numel() for p in tiny_model(**changes).parameters())


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj", "v_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}],
    ids=["an adapter on the output", "an output of its own"],
)
@pytest.mark.parametrize("changes", VARIANTS)
@OLD_CHECKPOINTING_NAME
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")  # what PEFT says of tied outputs
def test_the_loss_is_that_of_the_logits_where_an_adapter_wraps_the_output(tmp_path, batch, changes, settings):
    base = tiny_model(seed=7, **changes)
    base.save_pretrained(tmp_path / "base")
    model = lora(base, **settings)
    losses = fine_tune(model, batch)
    assert losses[-1] < 0.9 * losses[0]
    outputs = model.train()(**batch, label_smoothing=0.1, return_logits=True)
    expected = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
    loss = model(**batch, label_smoothing=0.1).loss
    torch.testing.assert_close(loss, expected)
    model.zero_grad()
    loss.backward()
    wrapped = [p for name, p in model.named_parameters() if "lm_head" in name and p.requires_grad]
    assert wrapped
    assert all(parameter.grad.count_nonzero() for parameter in wrapped)

    expected = model.eval()(**batch).logits
    model.save_pretrained(tmp_path / "adapter")
    fresh = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(fresh.eval()(**batch).logits, expected)
    if "target_modules" in settings and changes.get("tie_word_embeddings", True):
        return  # merged into a tied output, the adapter would change the embedding too: PEFT warns of it
    merged = fresh.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(loaded(**batch).logits, merged(**batch).logits, rtol=0, atol=0)


# Parts by themselves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", VARIANTS)
@torch.no_grad()
def test_encoder_and_decoder_are_saved_and_loaded_by_themselves(tmp_path, batch, changes, dtype):
    model = tiny_model(decoder_layers=3, **changes).to(dtype)
    parts = {}
    for part, expected_class in ((model.get_encoder(), VanillaTrmEncoder), (model.get_decoder(), VanillaTrmDecoder)):
        folder = tmp_path / expected_class.__name__
        part.save_pretrained(folder)
        parts[expected_class], report = expected_class.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    expected = model(**batch)
    encoded = parts[VanillaTrmEncoder](**without_labels(batch)).last_hidden_state
    assert torch.equal(encoded, expected.encoder_last_hidden_state)
    decoded = parts[VanillaTrmDecoder](
        input_ids=model.prepare_decoder_input_ids_from_labels(batch["labels"]),
        encoder_hidden_states=encoded,
        encoder_attention_mask=batch["attention_mask"],
    )
    assert torch.equal(model.lm_head(model.lm_head_projection(decoded.last_hidden_state)), expected.logits)
