"""Attention maps, and the pictures of them."""

import pytest
import torch
from PIL import Image

from tests.conftest import tiny_model
from training.attention import attention_maps, draw, draw_kind, main
from training.tokenizer import train_tokenizer

TEXTS = ["Ein Hund läuft", "Zwei $5 Kinder_spielen im Park"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, vocab_size=320)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), encoder_layers=3, decoder_layers=2, max_position_embeddings=80)


def test_maps_have_a_row_for_each_token_and_a_distribution_in_each_row(model, tokenizer):
    maps = attention_maps(model, tokenizer, TEXTS[0], TEXTS[1])
    source, target = (tokenizer(text).input_ids for text in TEXTS)
    assert maps.encoder.shape == (3, 2, len(source), len(source))
    assert maps.decoder.shape == (2, 2, len(target), len(target))
    assert maps.cross.shape == (2, 2, len(target), len(source))
    for probabilities in (maps.encoder, maps.decoder, maps.cross):
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]))
    assert maps.decoder.triu(1).abs().max() == 0, "nothing attends to what comes after it"
    assert "".join(maps.source).replace("▁", " ") == TEXTS[0] + "</s>"
    assert maps.target[0] == "<s>"
    assert len(maps.target) == len(target)


def test_the_maps_are_those_of_the_formula(model, tokenizer):
    """The first encoder layer, from embeddings and projections alone."""
    maps = attention_maps(model, tokenizer, TEXTS[0], TEXTS[1])
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    states = model.get_encoder()(input_ids=ids, output_hidden_states=True).hidden_states[0]
    attention = model.get_encoder().layers[0].self_attn
    query, key = (
        projection(states).view(1, -1, 2, 8).transpose(1, 2) for projection in (attention.q_proj, attention.k_proj)
    )
    expected = torch.softmax(query @ key.mT / 8**0.5, dim=-1)
    torch.testing.assert_close(maps.encoder[:1], expected.detach(), rtol=1e-4, atol=1e-5)


def test_without_a_target_it_is_the_model_s_own(model, tokenizer):
    model.generation_config.max_new_tokens = 5
    maps = attention_maps(model, tokenizer, TEXTS[0])
    assert maps.cross.shape[3] == len(maps.source)
    assert maps.target[0] == "<s>"


def test_a_target_may_be_given_as_tokens(model, tokenizer):
    tokens = tokenizer(TEXTS[1]).input_ids
    as_text, as_tokens = (attention_maps(model, tokenizer, TEXTS[0], target) for target in (TEXTS[1], tokens))
    assert as_tokens.target == as_text.target
    torch.testing.assert_close(as_tokens.cross, as_text.cross)


def test_parts_of_a_character_are_named_by_their_bytes(model, tokenizer):
    maps = attention_maps(model, tokenizer, "雪", "ok")
    assert "".join(maps.source) == "⟨E9⟩⟨9B⟩⟨AA⟩</s>"


def test_a_blank_sentence_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="the sentence is blank"):
        attention_maps(model, tokenizer, "  ")


def test_a_picture_has_a_map_for_every_layer_and_head():
    maps = torch.softmax(torch.randn(3, 2, 5, 7), dim=-1)
    figure = draw(maps, list("abcde"), list("tuvwxyz"), "title")
    assert len(figure.axes) == 6
    for number, axes in enumerate(figure.axes):
        (image,) = axes.get_images()
        torch.testing.assert_close(torch.from_numpy(image.get_array().data), maps[number // 2, number % 2])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list("abcde")


def test_a_picture_of_the_mean_has_a_map_for_every_layer(model, tokenizer):
    maps = attention_maps(model, tokenizer, TEXTS[0], TEXTS[1])
    figure = draw_kind(maps, "encoder", mean_over_heads=True)
    assert len(figure.axes) == 3
    for layer, axes in enumerate(figure.axes):
        (image,) = axes.get_images()
        torch.testing.assert_close(torch.from_numpy(image.get_array().data), maps.encoder[layer].mean(dim=0))
    assert figure.axes[0].get_title() == "mean over heads"


def test_the_command_writes_three_pictures(model, tokenizer, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = [TEXTS[0], "--model", str(tmp_path / "model"), "--target", TEXTS[1], "--output", str(tmp_path / "maps")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for name in ("encoder", "decoder", "cross"):
        with Image.open(tmp_path / "maps" / f"{name}.png") as picture:
            assert min(picture.size) > 200
        assert f"{name}.png" in printed
    assert main(["", *command[1:]]) == 1
    assert "the sentence is blank" in capsys.readouterr().err
