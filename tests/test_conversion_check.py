"""The comparison of a MarianMT with what it is converted to."""

import json

import pytest
import torch

from hf_vanilla_trm import from_marian
from tests.test_conversion import tiny_marian
from training import conversion_check
from training.benchmark import main
from training.decode_speed import Task
from training.tokenizer import train_tokenizer

LINES = ["Buch", "Zwei Kinder spielen im Park .", "Eine Frau liest", "die Wiese", "Hund und Kinder im Buch ; Park"]


@pytest.fixture
def marian(tmp_path):
    tokenizer = train_tokenizer(LINES * 3, vocab_size=300)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    model = tiny_marian(seed=1, **sizes, forced_eos_token_id=None, max_position_embeddings=200)
    model.generation_config.bad_words_ids = [[1]]
    model.save_pretrained(tmp_path / "marian")
    tokenizer.save_pretrained(tmp_path / "marian")
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in LINES))
    return tmp_path / "marian"


def test_all_forms_are_compared_with_the_original(marian, tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    flags = [f"--model={marian}", f"--source={tmp_path / 'lines'}", f"--reference={tmp_path / 'lines'}"]
    assert main(["conversion", *flags, "--beams=2", f"--output_dir={tmp_path / 'out'}"]) == 0
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["largest_difference"] < 1e-4
    assert report["equal_parameters"] == report["parameters"] > 50
    rows = {row["form"]: row for row in report["rows"]}
    for name in ("MarianMT", "ours, by generate", "back to MarianMT"):
        assert rows[name]["identical"] == rows[name]["of"] == 5
        assert rows[name]["bleu"] == rows["MarianMT"]["bleu"]
    assert "| ours, by search |" in capsys.readouterr().out


def test_scores_are_log_probabilities_over_a_power_of_the_length():
    model = from_marian(tiny_marian())
    sources, some, others = [[3, 4, 0], [5, 0]], [[7, 8, 0], [9, 0]], [[7, 8, 0], [9, 6, 5, 0]]
    scores = []
    for tokens in (some[1], others[1]):
        inputs = torch.tensor([[19, *tokens[:-1]]])
        with torch.no_grad():
            log_probs = model(torch.tensor([sources[1]]), decoder_input_ids=inputs).logits[0].log_softmax(-1)
        total = sum(float(log_probs[place, token]) for place, token in enumerate(tokens))
        scores.append(total / len(tokens) ** 0.6)
    found = conversion_check.score_difference(model, sources, some, others)
    assert found == pytest.approx(abs(scores[0] - scores[1]), abs=1e-5)
    assert found > 0.01
    assert conversion_check.score_difference(model, sources, some, some) == 0


def test_identical_translations_are_counted_and_bleu_is_of_the_texts(marian):
    tokenizer = train_tokenizer(LINES * 3, vocab_size=300)
    own = tokenizer(LINES)["input_ids"]
    task = Task(own, LINES, 4)
    rows = conversion_check.compare({"MarianMT": own, "other": [*own[:3], *own[:2]]}, task, tokenizer)
    assert [(row["identical"], row["of"]) for row in rows] == [(5, 5), (3, 5)]
    assert rows[0]["bleu"] == pytest.approx(100)
    assert rows[1]["bleu"] < 90


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "lines").write_text("one\n"), "--reference has 5 lines, and --source 1"),
        (lambda folder: (folder / "lines").unlink(), "lines"),
        (lambda folder: tiny_marian(d_model=12, decoder_ffn_dim=8).save_pretrained(folder / "marian"), "ffn_dim"),
    ],
)
def test_what_could_only_fail_later_is_refused_at_once(marian, tmp_path, change, message):
    (tmp_path / "reference").write_text("".join(f"{line}\n" for line in LINES))
    change(tmp_path)
    flags = [f"--model={marian}", f"--source={tmp_path / 'lines'}", f"--reference={tmp_path / 'reference'}"]
    with pytest.raises(SystemExit, match=message):
        main(["conversion", *flags, f"--output_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out" / "conversion.json").exists()
