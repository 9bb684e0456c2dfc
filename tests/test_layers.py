"""The parts of the paper in plain torch, against arithmetic and the paper's own claims."""

import math

import pytest
import torch

from hf_vanilla_trm.layers import (
    FeedForward,
    SinusoidalPositions,
    scaled_dot_product_attention,
    shift_right,
    sinusoids,
)
from hf_vanilla_trm.softmax import softmax


def test_sinusoids_are_interleaved_sines_and_cosines_of_the_paper():
    d_model, encodings = 6, sinusoids(torch.arange(50), 6)
    for position in (0, 1, 49):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            assert encodings[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert encodings[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_the_encoding_of_a_later_position_is_one_linear_map_of_the_earlier():
    d_model, offset = 8, 5
    earlier, later = sinusoids(torch.arange(30), d_model), sinusoids(torch.arange(30) + offset, d_model)
    rotation = torch.zeros(d_model, d_model, dtype=torch.float64)
    for i in range(d_model // 2):
        angle = offset / 10000 ** (2 * i / d_model)
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        )
    torch.testing.assert_close(later, earlier @ rotation.T, rtol=0, atol=1e-7)


def test_positions_beyond_the_table_continue_the_formula():
    positions = SinusoidalPositions(num_positions=4, d_model=6)
    inside, beyond = positions(torch.arange(4), 4), positions(torch.arange(9), 9)
    torch.testing.assert_close(beyond[:4], inside, rtol=0, atol=0)
    torch.testing.assert_close(beyond, sinusoids(torch.arange(9), 6).float(), rtol=0, atol=0)
    for length in (3, 4, 5):
        torch.testing.assert_close(positions(torch.arange(length), length), beyond[:length], rtol=0, atol=0)


@pytest.mark.parametrize("d_model", [16, 512])
@pytest.mark.parametrize("table_length", [2048, 4], ids=["in the table", "beyond the table"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_up_to_2047_are_computed_before_they_are_cast(d_model, table_length, dtype):
    encodings = SinusoidalPositions(table_length, d_model).to(dtype)(torch.arange(2048), 2048)
    assert encodings.dtype == dtype
    for position in (1, 255, 257, 1023, 1025, 2046, 2047):
        angles = [position / 10000 ** (2 * i / d_model) for i in range(d_model // 2)]
        expected = torch.tensor([(math.sin(angle), math.cos(angle)) for angle in angles], dtype=torch.float64)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(encodings[position].double(), expected.flatten(), rtol=unit, atol=1e-5)


def test_the_table_is_not_saved_and_follows_the_module():
    positions = SinusoidalPositions(num_positions=4, d_model=6)
    assert positions.state_dict() == {}
    assert positions.to(torch.bfloat16).table.dtype == torch.bfloat16
    assert positions(torch.arange(9), 9).dtype == torch.bfloat16
    assert positions.to("meta").table.device.type == "meta"
    assert positions(torch.arange(9, device="meta"), 9).device.type == "meta"


def test_attention_weights_are_the_softmax_of_scaled_scores():
    query = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).view(1, 1, 1, 4)
    key = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).view(1, 1, 2, 4)
    value = torch.tensor([[10.0], [20.0]]).view(1, 1, 2, 1)
    output, weights = scaled_dot_product_attention(query, key, value)
    first = math.exp(2 / math.sqrt(4)) / (math.exp(2 / math.sqrt(4)) + 1)
    assert weights.flatten().tolist() == pytest.approx([first, 1 - first])
    assert output.item() == pytest.approx(10 * first + 20 * (1 - first))


def test_scores_of_unit_variance_vectors_keep_unit_variance_for_any_d_k():
    torch.manual_seed(0)
    for d_k in (4, 64, 256):
        query, key = torch.randn(1, 1, 300, d_k), torch.randn(1, 1, 200, d_k)
        _, weights = scaled_dot_product_attention(query, key, torch.randn(1, 1, 200, 3))
        # The logarithm of the weights is the scores up to a constant a row.
        assert weights.log().var(dim=-1).mean().item() == pytest.approx(1, abs=0.1)


def test_masked_positions_get_weight_zero_and_a_query_without_keys_gets_zeros():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 4, requires_grad=True) for length in (5, 7, 7))
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, :, 4:] = False
    mask[1] = False
    output, weights = scaled_dot_product_attention(query, key, value, mask)
    assert weights[0, :, :, 4:].count_nonzero() == 0
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(3, 5))
    assert output[1].count_nonzero() == 0
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 32, 33])
def test_the_softmax_is_that_of_torch_for_rows_of_any_length(dtype, length):
    torch.manual_seed(0)
    scores = (3 * torch.randn(2, 3, length)).to(dtype)
    ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    slope = torch.randn(2, 3, length).to(dtype)
    (softmax(ours) * slope).sum().backward()
    (theirs.softmax(-1) * slope).sum().backward()
    torch.testing.assert_close(softmax(ours), theirs.softmax(-1))
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 15, 16, 40])
def test_a_row_of_nothing_but_the_lowest_number_has_no_weight_whatever_its_scores(dtype, length):
    scores = torch.tensor([[-90.0], [0.0], [90.0]]).expand(3, length).to(dtype)
    masked = (scores + torch.finfo(dtype).min).requires_grad_()
    weights = softmax(masked)
    weights.sum().backward()
    assert weights.count_nonzero() == 0
    assert masked.grad.isfinite().all()


def test_a_mask_may_be_added_to_the_scores_or_say_what_may_be_attended_to():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 4) for length in (5, 7, 7))
    allowed = torch.rand(2, 1, 5, 7) < 0.6
    allowed[1, 0, 2] = False
    added = torch.zeros(2, 1, 5, 7).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for by_truth, by_sum in zip(
        scaled_dot_product_attention(query, key, value, allowed),
        scaled_dot_product_attention(query, key, value, added),
        strict=True,
    ):
        assert torch.equal(by_truth, by_sum)


def test_the_feed_forward_network_is_two_linear_maps_around_a_relu_at_every_position():
    torch.manual_seed(0)
    feed_forward, x = FeedForward(d_model=4, d_ff=6), torch.randn(3, 5, 4)
    w1, b1 = feed_forward.fc1.weight, feed_forward.fc1.bias
    w2, b2 = feed_forward.fc2.weight, feed_forward.fc2.bias
    expected = torch.stack([w2 @ torch.clamp(w1 @ position + b1, min=0) + b2 for position in x.reshape(-1, 4)])
    torch.testing.assert_close(feed_forward(x).reshape(-1, 4), expected)


def test_decoder_inputs_are_the_labels_behind_the_start_token():
    labels = torch.tensor([[5, -100, 7, 2, -100], [6, 2, -100, -100, -100]])
    shifted = shift_right(labels, start_token_id=0, pad_token_id=1)
    assert shifted.tolist() == [[0, 5, 1, 7, 2], [0, 6, 2, 1, 1]]
