"""Folders that a stranger loads with `trust_remote_code`: our code travels with every saved model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_vanilla_trm
from hf_vanilla_trm import (
    VanillaTrmConfig,
    VanillaTrmEncoderModel,
    VanillaTrmForConditionalGeneration,
    VanillaTrmForSequenceClassification,
    VanillaTrmModel,
    configuration_vanilla_trm,
)
from hf_vanilla_trm.layers import sinusoids
from tests.conftest import STAYS_BEHIND, tiny_config, tiny_model
from training.tokenizer import train_tokenizer

PACKAGE = Path(hf_vanilla_trm.__file__).parent
CODE = {path.name for path in PACKAGE.glob("*.py")} - STAYS_BEHIND
HARD_TEXTS = [
    "Grüße, Ärger  und Öl .",
    "x != y . Was ?",
    "12:30 Uhr, 1.234,5 km",
    "日本語 中文",
    "🙂 né",
    "  lead and trail  ",
]
CLASSES = [
    VanillaTrmModel,
    VanillaTrmForConditionalGeneration,
    VanillaTrmEncoderModel,
    VanillaTrmForSequenceClassification,
]

pytestmark = pytest.mark.slow

STRANGER = """
import sys
sys.modules["hf_vanilla_trm"] = None  # importing it fails
import json, os, torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
from transformers import AutoModelForTextEncoding, AutoTokenizer
given = torch.load("given.pt")
"""


def run(code, cwd, **environment):
    """Run Python code in a fresh interpreter that can ask nobody."""
    environment = os.environ | {"HF_HOME": str(cwd / "hf_home"), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", code]
    options = {"cwd": cwd, "env": environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, check=False, **options)


def files_of(folder):
    return {path.name for path in folder.glob("*.py")}


@pytest.mark.parametrize("model_class", CLASSES)
def test_every_saved_folder_holds_all_code_and_names_every_class(tmp_path, model_class):
    model_class(tiny_config()).save_pretrained(tmp_path)
    assert files_of(tmp_path) == CODE
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    heads = {"AutoModel", "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification", "AutoModelForTextEncoding"}
    assert auto_map.keys() == {"AutoConfig"} | heads
    for reference in auto_map.values():
        module, name = reference.split(".")
        assert f"{module}.py" in CODE
        assert getattr(hf_vanilla_trm, name).__module__ == f"hf_vanilla_trm.{module}"


def test_saving_into_the_folder_of_the_code_itself_leaves_it_whole(tmp_path, monkeypatch):
    for name in CODE:
        (tmp_path / name).write_bytes((PACKAGE / name).read_bytes())
    monkeypatch.setattr(configuration_vanilla_trm, "__file__", str(tmp_path / "configuration_vanilla_trm.py"))
    tiny_config().save_pretrained(tmp_path)
    assert files_of(tmp_path) == CODE
    assert all((tmp_path / name).read_bytes() == (PACKAGE / name).read_bytes() for name in CODE)


def test_a_config_that_breaks_a_rule_is_refused_before_anything_is_written(tmp_path):
    config = tiny_config()
    config.num_attention_heads = 3
    with pytest.raises(ValueError, match=r"d_model \(16\) must be divisible by num_attention_heads \(3\)"):
        config.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_stranger_loads_every_class_from_one_folder_with_the_same_results(tmp_path, batch):
    model = tiny_model(seed=7)
    model.save_pretrained(tmp_path / "model")
    torch.save(
        {
            "batch": batch,
            "logits": model(**batch).logits,
            "translations": model.generate(batch["input_ids"], num_beams=3, max_new_tokens=6),
            "encoded": model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state,
            "table": sinusoids(torch.arange(40), 16),
        },
        tmp_path / "given.pt",
    )
    code = (
        STRANGER
        + """
batch = given["batch"]
source = {name: batch[name] for name in ("input_ids", "attention_mask")}
for folder in ("model", "again"):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    assert torch.equal(model(**batch).logits, given["logits"])
    assert torch.equal(model.generate(batch["input_ids"], num_beams=3, max_new_tokens=6), given["translations"])
    encoders = [AutoModel.from_pretrained(folder, trust_remote_code=True).encoder]
    encoders.append(AutoModelForTextEncoding.from_pretrained(folder, trust_remote_code=True))
    encoders.append(AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).model)
    for encoder in encoders:
        assert torch.equal(encoder(**source).last_hidden_state, given["encoded"])
    for dtype in (torch.float32, torch.bfloat16):
        half = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
        table = half.model.decoder.embed_positions.table
        torch.testing.assert_close(table.double(), given["table"], rtol=0, atol=1e-6)
    model.save_pretrained("again")
encoders[1].save_pretrained("encoder")
assert type(AutoModel.from_pretrained("encoder", trust_remote_code=True)).__name__ == "VanillaTrmEncoderModel"
assert type(AutoConfig.from_pretrained("again", trust_remote_code=True)).__name__ == "VanillaTrmConfig"
"""
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert files_of(tmp_path / "again") == files_of(tmp_path / "encoder") == CODE
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")  # and back with the package
    assert type(again) is VanillaTrmForConditionalGeneration
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_strangers_trainer_checkpoint_holds_all_that_another_stranger_needs(tmp_path, batch):
    tokenizer = train_tokenizer(["a b c d e f g"], vocab_size=270)
    for part in (tokenizer, tiny_model(vocab_size=len(tokenizer))):
        part.save_pretrained(tmp_path / "model")
    torch.save({"batch": batch}, tmp_path / "given.pt")
    code = (
        STRANGER
        + """
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
model = AutoModelForSeq2SeqLM.from_pretrained("model", trust_remote_code=True)
rows = [{name: tensor[row] for name, tensor in given["batch"].items()} for row in range(3)]
arguments = Seq2SeqTrainingArguments("run", max_steps=1, per_device_train_batch_size=3, use_cpu=True, report_to=[])
tokenizer = AutoTokenizer.from_pretrained("model")
trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
torch.save(model.eval()(**given["batch"]).logits, "logits.pt")
"""
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert files_of(checkpoint) == CODE
    (tmp_path / "model").rename(tmp_path / "gone")
    code = (
        STRANGER
        + """
model = AutoModelForSeq2SeqLM.from_pretrained("run/checkpoint-1", trust_remote_code=True)
assert torch.equal(model(**given["batch"]).logits, torch.load("logits.pt"))
assert AutoTokenizer.from_pretrained("run/checkpoint-1").decode([5])
"""
    )
    result = run(code, tmp_path, HF_HOME=str(tmp_path / "another_home"))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("first", ["package", "remote"])
def test_the_package_wins_and_both_work_in_one_process(tmp_path, batch, first):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    torch.save({"batch": batch, "logits": model(**batch).logits}, tmp_path / "given.pt")
    remote = """
remote = AutoModelForSeq2SeqLM.from_pretrained("model", trust_remote_code=True)
assert torch.equal(remote(**given["batch"]).logits, given["logits"])
"""
    package = """
import hf_vanilla_trm
ours = AutoModelForSeq2SeqLM.from_pretrained("model")
assert type(ours) is hf_vanilla_trm.VanillaTrmForConditionalGeneration
assert torch.equal(ours(**given["batch"]).logits, given["logits"])
"""
    code = STRANGER.replace('sys.modules["hf_vanilla_trm"] = None', "") + (
        package + remote + "assert type(remote) is type(ours)" if first == "package" else remote + package
    )
    result = run(code, tmp_path, PYTHONPATH=str(PACKAGE.parent))
    assert result.returncode == 0, result.stderr


def test_without_the_package_the_error_says_what_to_pass(tmp_path, batch):
    tiny_model().save_pretrained(tmp_path / "model")
    torch.save({}, tmp_path / "given.pt")
    result = run(STRANGER + 'AutoModelForSeq2SeqLM.from_pretrained("model")', tmp_path)
    assert result.returncode != 0
    assert "Please pass the argument `trust_remote_code=True`" in result.stderr


def test_a_tokenizer_gives_a_stranger_the_same_ids_and_text(tmp_path):
    tokenizer = train_tokenizer(HARD_TEXTS, vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    ids = tokenizer(HARD_TEXTS)["input_ids"]
    torch.save({"texts": HARD_TEXTS, "ids": ids}, tmp_path / "given.pt")
    code = (
        STRANGER
        + """
tokenizer = AutoTokenizer.from_pretrained("model")
assert tokenizer(given["texts"])["input_ids"] == given["ids"]
assert tokenizer.batch_decode(given["ids"], skip_special_tokens=True) == given["texts"]
"""
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(HARD_TEXTS)["input_ids"] == ids


def test_a_stranger_translates_strings_samples_and_scores_as_the_package_does(tmp_path):
    """With the decoding that travels with the model."""
    tokenizer = train_tokenizer(HARD_TEXTS, vocab_size=300)
    model = tiny_model(seed=7, vocab_size=len(tokenizer))
    model.generation_config.num_beams = 3
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer(HARD_TEXTS[0])["input_ids"]])
    torch.save(
        {
            "texts": [*HARD_TEXTS, ""],
            "ids": ids,
            "translations": model.translate([*HARD_TEXTS, ""], tokenizer, max_length_b=2),
            "found": [list(one) for one in model.search(ids, num_hypotheses=2, max_length_b=2)[0]],
            "drawn": model.sample(ids, generator=torch.Generator().manual_seed(5), max_length_b=2)[0][0].tokens,
            "scored": model.token_log_probs(ids, ids),
        },
        tmp_path / "given.pt",
    )
    code = (
        STRANGER
        + """
tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=False)
model = AutoModelForSeq2SeqLM.from_pretrained("model", trust_remote_code=True)
ids = given["ids"]
assert model.translate(given["texts"], tokenizer, max_length_b=2) == given["translations"]
assert [list(one) for one in model.search(ids, num_hypotheses=2, max_length_b=2)[0]] == given["found"]
generator = torch.Generator().manual_seed(5)
assert model.sample(ids, generator=generator, max_length_b=2)[0][0].tokens == given["drawn"]
assert torch.equal(model.token_log_probs(ids, ids), given["scored"])
"""
    )
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_config_alone_is_saved_with_the_code(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert files_of(tmp_path) == CODE
    assert type(VanillaTrmConfig.from_pretrained(tmp_path)) is VanillaTrmConfig
