"""Models, tokenizers and data sets on the Hub: pushed and pulled by the real clients, with the package and without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import hf_vanilla_trm
from hf_vanilla_trm import VanillaTrmForConditionalGeneration, VanillaTrmForSequenceClassification
from tests.conftest import STAYS_BEHIND, spread_weights, tiny_config, tiny_model
from tests.hub import READER, STRANGER, WRITER, Hub
from training.arguments import DataArguments
from training.data import load_pairs
from training.tokenizer import train_tokenizer

# huggingface_hub's own, where it uploads by LFS.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "tester/tiny"
CODE = {path.name for path in Path(hf_vanilla_trm.__file__).parent.glob("*.py")} - STAYS_BEHIND
TEXTS = ["Grüße  aus Öl", "haus", " 日本 x"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with Hub() as server:
        server.connect(monkeypatch, tmp_path / "cache", WRITER)
        yield server


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=262)


@pytest.fixture
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer))


def logits(model, tokenizer):
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        return model(**batch, decoder_input_ids=torch.tensor([[0, 5], [0, 7], [0, 9]])).logits


# In this process, with the package --------------------------------------------------------------------------------


def test_a_pushed_model_comes_back_bit_for_bit_with_its_code_and_settings(hub, model, tokenizer):
    model.generation_config.num_beams = 3
    model.push_to_hub(REPO)
    tokenizer.push_to_hub(REPO)
    assert hub.files(REPO).keys() >= CODE | {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    loaded, its_tokenizer = AutoModelForSeq2SeqLM.from_pretrained(REPO), AutoTokenizer.from_pretrained(REPO)
    assert type(loaded) is VanillaTrmForConditionalGeneration, "the package wins over the code in the repository"
    assert torch.equal(logits(loaded, its_tokenizer), logits(model, tokenizer))
    assert loaded.generation_config.num_beams == 3
    assert its_tokenizer(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    encoder = AutoModelForTextEncoding.from_pretrained(REPO)
    assert torch.equal(encoder.state_dict()["shared.weight"], model.get_input_embeddings().weight)


def test_no_question_is_asked_and_no_code_is_fetched_where_the_package_is(hub, model, tokenizer, monkeypatch):
    model.push_to_hub(REPO)
    tokenizer.push_to_hub(REPO)
    hub.requests.clear()
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a prompt"))
    for auto_class in (AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer):
        auto_class.from_pretrained(REPO)
    assert [path for _, path in hub.requests if path.endswith(".py")] == []


def test_a_push_by_folder_name_and_a_push_of_the_config_alone_work(hub, model, tmp_path):
    model.save_pretrained(tmp_path / "named", push_to_hub=True)
    assert hub.files("tester/named").keys() >= CODE | {"model.safetensors"}
    model.config.push_to_hub(REPO)
    assert AutoConfig.from_pretrained(REPO).d_model == model.config.d_model
    assert json.loads(hub.files(REPO)["config.json"])["auto_map"].keys() >= {"AutoConfig", "AutoModelForSeq2SeqLM"}
    assert hub.files(REPO).keys() >= CODE


def test_the_trainer_pushes_what_loads_with_its_card(hub, model, tokenizer, tmp_path):
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        push_to_hub=True,
        hub_model_id=REPO,
        hub_private_repo=True,
    )
    rows = [tokenizer(text, text_target=text) for text in TEXTS]
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
    trainer.train()
    trainer.push_to_hub()
    assert hub.repos[f"models/{REPO}"].private
    assert hub.files(REPO).keys() >= CODE | {"model.safetensors", "tokenizer.json"}
    loaded = AutoModelForSeq2SeqLM.from_pretrained(REPO)
    assert not torch.equal(loaded.state_dict()["lm_head.weight"], before["lm_head.weight"])
    assert torch.equal(logits(loaded, AutoTokenizer.from_pretrained(REPO)), logits(trainer.model.eval(), tokenizer))
    card = ModelCard.load(REPO)
    assert card.data.library_name == "transformers"
    assert "generated_from_trainer" in card.data.tags


def test_a_card_with_results_is_pushed_and_read_back(hub):
    result = EvalResult("translation", "words", "words", metric_type="bleu", metric_value=38.7)
    data = ModelCardData(language=["en", "de"], model_name="tiny", eval_results=[result])
    text = f"---\n{data.to_yaml()}\n---\n# tiny\n"
    HfApi().create_repo(REPO)
    ModelCard(text).push_to_hub(REPO)
    card = ModelCard.load(REPO)
    assert card.data.language == ["en", "de"]
    assert card.data.eval_results[0].metric_value == 38.7
    assert card.text == "# tiny\n"


def test_a_private_repository_opens_to_its_owners_tokens_only(hub, model, tokenizer, monkeypatch, tmp_path):
    model.push_to_hub(REPO, private=True)
    tokenizer.push_to_hub(REPO)
    for number, token in enumerate((None, "hf_wrong", STRANGER)):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / f"refused{number}"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        for auto_class in (AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer):
            with pytest.raises(OSError, match=REPO) as refusal:
                auto_class.from_pretrained(REPO)
            assert token is None or token not in str(refusal.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "opened"))
    monkeypatch.setenv("HF_TOKEN", READER)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(REPO)
    assert torch.equal(logits(loaded, AutoTokenizer.from_pretrained(REPO)), logits(model, tokenizer))
    with pytest.raises(HfHubHTTPError, match="403"):
        model.push_to_hub("tester/new")


def test_a_branch_and_a_pull_request_hold_other_weights_than_main(hub, model, tokenizer):
    others = {"wip/two": tiny_model(seed=2, vocab_size=len(tokenizer))}
    model.push_to_hub(REPO)
    HfApi().create_branch(REPO, branch="wip/two")
    others["wip/two"].push_to_hub(REPO, revision="wip/two")
    third = tiny_model(seed=3, vocab_size=len(tokenizer))
    others[third.push_to_hub(REPO, create_pr=True).pr_revision] = third
    assert set(others) == {"wip/two", "refs/pr/1"}
    for revision, expected in {"main": model, **others}.items():
        loaded = AutoModelForSeq2SeqLM.from_pretrained(REPO, revision=revision)
        assert torch.equal(logits(loaded, tokenizer), logits(expected, tokenizer)), revision
    with pytest.raises(OSError, match="v9 is not a valid git identifier"):
        AutoModelForSeq2SeqLM.from_pretrained(REPO, revision="v9")


@pytest.mark.parametrize("large", [True, False])
def test_a_data_set_is_pushed_and_read_as_pairs(hub, large):
    """As parquet, which datasets uploads by LFS, and as a JSON lines file within the commit."""
    rows = {"train": [("haus", "house"), ("Öl", "oil"), ("  zwei", "two ")], "validation": [("x != y .", "z")]}
    splits = {
        split: [{"translation": {"de": source, "en": target}} for source, target in pairs]
        for split, pairs in rows.items()
    }
    if large:
        DatasetDict({split: Dataset.from_list(lines) for split, lines in splits.items()}).push_to_hub("tester/pairs")
    else:
        HfApi().create_repo("tester/pairs", repo_type="dataset")
        for split, lines in splits.items():
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            HfApi().upload_file(
                path_or_fileobj=data, path_in_repo=f"{split}.jsonl", repo_id="tester/pairs", repo_type="dataset"
            )
    columns = {"source_column": "translation.de", "target_column": "translation.en"}
    pairs = load_pairs(DataArguments(dataset_name="tester/pairs", test_split="", **columns))
    assert {split: list(zip(part["source"], part["target"], strict=True)) for split, part in pairs.items()} == rows


# In fresh processes ------------------------------------------------------------------------------------------------

STRANGER_CODE = """
import sys
from pathlib import Path
sys.modules["hf_vanilla_trm"] = None  # importing it fails
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
from transformers import AutoModelForTextEncoding, AutoTokenizer

given = torch.load("given.pt")
with torch.no_grad():
    for repo in ("tester/tiny", "tester/again"):
        model = AutoModelForSeq2SeqLM.from_pretrained(repo, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
        batch = tokenizer(given["texts"], return_tensors="pt", padding=True)
        assert torch.equal(model(**batch, decoder_input_ids=given["decoder_input_ids"]).logits, given["logits"])
        assert torch.equal(model.generate(**batch, num_beams=3, max_new_tokens=6), given["translations"])
        bare = AutoModel.from_pretrained(repo, trust_remote_code=True)
        encoder = AutoModelForTextEncoding.from_pretrained(repo, trust_remote_code=True)
        encoded = encoder(**batch).last_hidden_state
        assert torch.equal(bare.get_encoder()(**batch).last_hidden_state, encoded)
        assert torch.equal(encoded, given["encoded"])
        config = AutoConfig.from_pretrained(repo, trust_remote_code=True)
        assert config.d_ff == model.config.d_ff
        for loaded in (model, bare, encoder, config):
            assert type(loaded).__module__.startswith("transformers_modules.tester."), type(loaded)
        if repo == "tester/tiny":
            model.push_to_hub("tester/again")
            tokenizer.push_to_hub("tester/again")
    AutoModelForSequenceClassification.from_pretrained("tester/classifier", trust_remote_code=True)
"""
BOTH_CODE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForSeq2SeqLM


def remote():
    model = AutoModelForSeq2SeqLM.from_pretrained("tester/tiny", trust_remote_code=True)
    return type(model).__module__.split(".")[0], model


def package():
    import hf_vanilla_trm
    model = AutoModelForSeq2SeqLM.from_pretrained("tester/tiny")
    return type(model).__module__.split(".")[0], model


order = [remote, package, package] if sys.argv[1] == "remote first" else [package, remote, package]
modules, models = zip(*(load() for load in order))
assert modules == tuple(sys.argv[2:]), modules
batch = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[0, 7, 8, 9]])}
with torch.no_grad():
    first, second, third = (model(**batch).logits for model in models)
assert torch.equal(first, second) and torch.equal(second, third)
"""
NEITHER_CODE = """
from transformers import AutoModelForSeq2SeqLM
AutoModelForSeq2SeqLM.from_pretrained("tester/tiny")
"""


def run_fresh(hub, code, folder, *words, token=WRITER):
    """Run code in a fresh interpreter with an empty cache and nobody to answer a prompt."""
    environment = os.environ | hub.environment(folder / "home", token) | {"OMP_NUM_THREADS": "1"}
    options = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 300}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, **options)


@pytest.mark.slow
def test_a_fresh_process_without_the_package_loads_everything_and_pushes_it_again(hub, model, tokenizer, tmp_path):
    model.push_to_hub(REPO)
    tokenizer.push_to_hub(REPO)
    classifier = VanillaTrmForSequenceClassification(tiny_config(vocab_size=len(tokenizer), num_labels=3))
    spread_weights(classifier).push_to_hub("tester/classifier")
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        given = {
            "texts": TEXTS,
            "decoder_input_ids": torch.tensor([[0, 5], [0, 7], [0, 9]]),
            "logits": logits(model, tokenizer),
            "translations": model.generate(**batch, num_beams=3, max_new_tokens=6),
            "encoded": model.get_encoder()(**batch).last_hidden_state,
        }
    torch.save(given, tmp_path / "given.pt")
    process = run_fresh(hub, STRANGER_CODE, tmp_path)
    assert process.returncode == 0, process.stderr
    first, again = hub.files(REPO), hub.files("tester/again")
    assert {name: again[name] for name in CODE} == {name: first[name] for name in CODE}
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained("tester/again"), tokenizer), given["logits"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "modules"),
    [
        ("remote first", ["transformers_modules", "hf_vanilla_trm", "hf_vanilla_trm"]),
        ("package first", ["hf_vanilla_trm"] * 3),
    ],
)
def test_package_and_repository_code_live_in_one_process_in_either_order(hub, model, tmp_path, order, modules):
    model.push_to_hub(REPO)
    process = run_fresh(hub, BOTH_CODE, tmp_path, order, *modules)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_with_neither_the_error_says_what_to_pass(hub, model, tmp_path):
    model.push_to_hub(REPO)
    process = run_fresh(hub, NEITHER_CODE, tmp_path)
    assert process.returncode == 1
    assert "trust_remote_code=True" in process.stderr
    assert REPO in process.stderr
