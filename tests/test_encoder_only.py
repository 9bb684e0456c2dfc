"""The encoder by itself and the classifier on it."""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    pipeline,
)

from hf_vanilla_trm import (
    VanillaTrmEncoderModel,
    VanillaTrmForConditionalGeneration,
    VanillaTrmForSequenceClassification,
    VanillaTrmModel,
)
from tests.conftest import spread_weights, tiny_config, tiny_model
from training.tokenizer import train_tokenizer

SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 25}


def tiny_classifier(**changes):
    return spread_weights(VanillaTrmForSequenceClassification(tiny_config(num_labels=3, **changes))).eval()


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, SEPARATE], ids=["tied", "untied", "separate"])
@pytest.mark.parametrize(
    ("auto_class", "encoder_of"),
    [
        (AutoModelForTextEncoding, lambda model: model),
        (AutoModelForSequenceClassification, lambda model: model.model),
    ],
    ids=["encoder", "classifier"],
)
def test_the_encoder_of_a_translation_model_is_loaded_from_its_folder(tmp_path, batch, auto_class, encoder_of, changes):
    translation = tiny_model(**changes)
    translation.save_pretrained(tmp_path)
    model, report = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert all(name.startswith("classifier.") for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    del batch["labels"]
    expected = translation.get_encoder()(**batch).last_hidden_state
    assert torch.equal(encoder_of(model)(**batch).last_hidden_state, expected)
    assert not model.config.is_encoder_decoder
    assert translation.config.is_encoder_decoder


@pytest.mark.parametrize("changes", [{}, SEPARATE], ids=["shared", "separate"])
def test_an_encoder_saved_by_itself_comes_back_by_every_auto_class(tmp_path, batch, changes):
    encoder = spread_weights(VanillaTrmEncoderModel(tiny_config(**changes))).eval()
    encoder.save_pretrained(tmp_path)
    expected = encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    for auto_class in (AutoModel, AutoModelForTextEncoding):
        loaded, report = auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is VanillaTrmEncoderModel
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert torch.equal(loaded(batch["input_ids"], batch["attention_mask"]).last_hidden_state, expected)
    translation = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(translation) is VanillaTrmForConditionalGeneration
    assert translation.config.is_encoder_decoder
    assert torch.equal(translation.get_encoder()(**{k: batch[k] for k in ("input_ids", "attention_mask")})[0], expected)


def test_an_encoder_alone_may_share_more_layers_than_a_decoder_has(tmp_path, batch):
    shared = {"parameter_sharing": "all", "num_unique_layers": 4, "is_encoder_decoder": False}
    encoder = spread_weights(VanillaTrmEncoderModel(tiny_config(encoder_layers=8, decoder_layers=2, **shared))).eval()
    encoder.save_pretrained(tmp_path)
    inputs = (batch["input_ids"], batch["attention_mask"])
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(*inputs).last_hidden_state, encoder(*inputs).last_hidden_state)


def test_a_model_made_of_an_encoders_config_has_one_config():
    model = VanillaTrmModel(tiny_config(is_encoder_decoder=False))
    assert model.encoder.config is model.decoder.config is model.config
    assert model.config.is_encoder_decoder


def test_the_encoder_takes_embeddings_and_resizes_like_the_whole_model(batch):
    encoder = spread_weights(VanillaTrmEncoderModel(tiny_config())).eval()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = encoder(ids, mask).last_hidden_state
    given = encoder(inputs_embeds=encoder.get_input_embeddings()(ids), attention_mask=mask)
    torch.testing.assert_close(given.last_hidden_state, expected)
    encoder.resize_token_embeddings(23)
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    assert (encoder.shared.num_embeddings, encoder.config.vocab_size, encoder.config.decoder_vocab_size) == (23, 23, 23)
    torch.testing.assert_close(encoder(ids, mask).last_hidden_state, expected)


def test_the_features_of_text_come_from_the_encoder_of_the_folder(tmp_path):
    lines = ["the cat sat on the mat", "a dog ate it all"]
    tokenizer = train_tokenizer(lines, vocab_size=270)
    tokenizer.save_pretrained(tmp_path)
    encoder = spread_weights(VanillaTrmEncoderModel(tiny_config(vocab_size=len(tokenizer)))).eval()
    encoder.save_pretrained(tmp_path)
    features = pipeline("feature-extraction", model=str(tmp_path))(lines[0])
    expected = encoder(**tokenizer(lines[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(torch.tensor(features), expected)


def test_a_sentence_is_classified_by_the_mean_over_its_real_tokens(batch):
    model = tiny_classifier()
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    for row, length in enumerate((7, 4, 6)):
        alone = batch["input_ids"][row : row + 1, :length]
        expected = model.classifier(model.model(alone).last_hidden_state.mean(dim=1))
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(batch["input_ids"]).logits, logits)  # the mask is made from the padding


def test_a_sentence_without_a_token_gives_finite_logits_and_leaves_the_others_alone(batch):
    model = tiny_classifier()
    expected = model(batch["input_ids"], batch["attention_mask"]).logits
    batch["attention_mask"][1] = 0
    outputs = model(batch["input_ids"], batch["attention_mask"], labels=torch.tensor([2, 0, 1]))
    torch.testing.assert_close(outputs.logits[1], model.classifier.bias)
    torch.testing.assert_close(outputs.logits[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-5)
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss"),
    [
        (3, torch.tensor([2, 0, 1]), torch.nn.functional.cross_entropy),
        (1, torch.tensor([0.5, -1.0, 2.0]), lambda logits, labels: ((logits[:, 0] - labels) ** 2).mean()),
        (2, torch.tensor([[1.0, 0], [0, 0], [1, 1]]), torch.nn.functional.binary_cross_entropy_with_logits),
    ],
    ids=["one of several", "a number", "any of several"],
)
def test_the_loss_of_a_classifier_is_that_of_its_labels(batch, num_labels, labels, loss):
    model = spread_weights(VanillaTrmForSequenceClassification(tiny_config(num_labels=num_labels))).eval()
    outputs = model(batch["input_ids"], batch["attention_mask"], labels=labels)
    torch.testing.assert_close(outputs.loss, loss(outputs.logits, labels))


def test_a_classifier_learns_and_comes_back(tmp_path, batch):
    torch.manual_seed(0)
    model = VanillaTrmForSequenceClassification(tiny_config(num_labels=3))
    labels, optimizer = torch.tensor([2, 0, 1]), torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    for _ in range(60):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded(**inputs).logits.argmax(dim=-1).tolist() == labels.tolist()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
