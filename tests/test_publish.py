"""Publishing: the card that a run fills, one commit, and what is said when something is wrong."""

import json
import math
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import training.average_checkpoints
import training.score
import training.train
from tests.hub import READER, STRANGER, WRITER, Hub
from tests.pairs import write_reversed_pairs
from training import card, publish

# huggingface_hub's own, where it uploads by LFS.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "tester/reverse"
GIVEN = ["--license", "cc-by-4.0", "--datasets", "tester/words"]
VERIFY_AS_A_STRANGER = publish.verify_as_a_stranger
COMMIT = {"commit": "c0ffee" + 34 * "0", "dirty": True}
WORDS = ["der", "hund", "katze", "haus", "baum", "sieht"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run on two aligned files, train.en and train.de."""
    folder = tmp_path_factory.mktemp("trained")
    rows = {"train": 12, "validation": 5, "test": 7}
    files = write_reversed_pairs(folder, WORDS, rows, lengths=3, suffixes=("en", "de"))
    sizes = {"vocab_size": 270, "d_model": 16, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 2}
    recipe = {"num_attention_heads": 2, "warmup_steps": 2, "batch_tokens": 150, "max_updates": 3, "seed": 11}
    other = {"max_length_b": 2, "num_beams": 2, "report_to": "none", "cpu_threads": 1, "output_dir": folder / "run"}
    AcceleratorState._reset_state(True)
    arguments = files | sizes | recipe | other
    assert training.train.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
    AcceleratorState._reset_state(True)
    # The tests may run outside a clone.
    edit(folder / "run" / "run.json", lambda record: record["sessions"][0].update(git=COMMIT))
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that run, to be spoiled."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(autouse=True)
def no_strangers(monkeypatch):
    """Their processes take seconds each; one test lets them load."""
    monkeypatch.setattr(publish, "verify_as_a_stranger", lambda *_: None)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with Hub() as server:
        server.connect(monkeypatch, tmp_path / "cache", WRITER)
        yield server


def edit(file, change):
    """Change a JSON file by a function of its content."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def refusal(capsys, run, *flags, given=GIVEN):
    """Publish, which must fail; return what it says, which must be one line."""
    assert publish.main(["--model", str(run), "--repo", REPO, *given, *flags]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    return message


def card_of(run, *flags, given=GIVEN):
    options = publish.parse_arguments(["--model", str(run), "--repo", REPO, *given, *flags])
    return card.render_card(card.read_run(run), options)


# The card ----------------------------------------------------------------------------------------------------------


def test_the_card_holds_the_runs_own_numbers_and_every_kind_of_metadata(run):
    text = str(card_of(run))
    front, body = yaml.safe_load(text.split("---\n")[1]), text.split("---\n", 2)[2]
    assert front["language"] == ["en", "de"]
    assert front["license"] == "cc-by-4.0"
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "translation"
    assert front["datasets"] == ["tester/words"]
    assert front["metrics"] == ["bleu", "chrf", "exact_match"]
    assert "hf_vanilla_trm" in front["tags"]

    results, record = (json.loads((run / name).read_text()) for name in ("results.json", "run.json"))
    (index,) = front["model-index"]
    assert {entry["dataset"]["split"]: entry["metrics"] for entry in index["results"]}.keys() == {"validation", "test"}
    for entry in index["results"]:
        scores = results[entry["dataset"]["split"]]
        assert {metric["type"]: metric["value"] for metric in entry["metrics"]} == {
            name: scores[name] for name in ("bleu", "chrf", "exact_match")
        }
        assert entry["metrics"][0]["args"] == {"signature": scores["bleu_signature"]}

    session = record["sessions"][-1]
    shown = [
        *("English to German", "test.en", "train.de", "https://huggingface.co/datasets/tester/words", "cc-by-4.0"),
        *(f"{results['parameters']:,}", f"{results['test']['chrf']:.2f}", f"{results['validation']['loss']:.2f}"),
        *(results["test"]["bleu_signature"], results["test"]["chrf_signature"], "| seed | 11 |", "| 1 + 2 |"),
        "max_updates (3) reached",
        *(
            session["hardware"]["cpu"],
            session["git"]["commit"],
            f"torch {torch.__version__}",
            "max_updates (3) reached",
        ),
        *(f'from_pretrained("{REPO}")', f'from_pretrained("{REPO}", trust_remote_code=True)', "vaswani2017attention"),
    ]
    for part in shown:
        assert part in text, part
    assert "{{" not in body
    assert str(run.parent) not in text, "the machine's paths are nobody's business"
    assert ModelCard(text).data.eval_results


def test_the_card_is_the_same_each_time(run):
    assert str(card_of(run)) == str(card_of(run / "best"))


@pytest.fixture
def scores(run, trained, tmp_path):
    """What training.score says of that run's model on its test data, with three beams."""
    files = ["--source", trained.parent / "test.en", "--reference", trained.parent / "test.de"]
    options = [
        "--num_beams",
        3,
        "--alpha",
        0.5,
        "--bootstrap",
        20,
        "--device",
        "cpu",
        "--output",
        tmp_path / "scores.json",
    ]
    assert training.score.main([*map(str, ["--model", run / "best", *files, *options])]) == 0
    return tmp_path / "scores.json"


def test_scores_of_the_score_command_stand_on_the_card_and_in_its_metadata(run, scores):
    result = json.loads(scores.read_text())
    without, text = str(card_of(run)), str(card_of(run, "--scores", str(scores)))
    (before,), (index,) = (yaml.safe_load(card.split("---\n")[1])["model-index"] for card in (without, text))
    *others, entry = index["results"]
    assert others == before["results"]
    assert entry["dataset"]["name"] == "test.en, test.de"
    found = {metric["type"]: (metric["value"], metric["args"]["signature"]) for metric in entry["metrics"]}
    assert found == {name: (score["score"], score["signature"]) for name, score in result["scores"].items()}
    assert yaml.safe_load(text.split("---\n")[1])["metrics"] == ["bleu", "chrf", "exact_match", "ter"]
    chrf = result["scores"]["chrf"]
    low, high = chrf["interval"]
    heading = "On test.en, test.de (7 lines), decoded with 3 beams and the paper's length penalty of alpha 0.5:"
    row = f"| chrF | {chrf['score']:.2f} | [{low:.2f}, {high:.2f}] |"
    for part in (heading, row, f"chrF is `{chrf['signature']}`", f"TER is `{result['scores']['ter']['signature']}`"):
        assert part in text
        assert part not in without
    assert str(run.parent) not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result["model"].update(weights="0"), "are of other weights than those in"),
        (lambda result: result["model"].update(weights=None), "does not say of which weights its scores are"),
        (lambda result: result.update(model=None, decoding=None), "does not say of which weights its scores are"),
        (lambda result: result["scores"]["ter"].update(score=math.inf), "the score ter is inf"),
        (lambda result: result["scores"]["ter"].update(score=None), "is no result of training.score"),
        (lambda result: result.pop("lines"), "is no result of training.score: KeyError('lines')"),
        (lambda result: result.pop("decoding"), "is no result of training.score: KeyError('decoding')"),
    ],
)
def test_scores_that_are_not_this_models_are_not_published(run, scores, capsys, change, message):
    edit(scores, change)
    assert message in refusal(capsys, run, "--dry-run", "--scores", str(scores))


def test_scores_that_cannot_be_read_or_told_apart_are_not_published(run, scores, capsys, tmp_path):
    assert "two files are of data of one name, test.en, test.de" in refusal(capsys, run, "--scores", *[str(scores)] * 2)
    assert "nothing.json" in refusal(capsys, run, "--scores", str(tmp_path / "nothing.json"))
    scores.write_text("{")
    assert "is no result of training.score" in refusal(capsys, run, "--scores", str(scores))


@pytest.mark.parametrize(
    ("arguments", "languages", "datasets", "words"),
    [
        ({"embedded_corpus": "en-zh"}, ["en", "zh"], ["unicode-cldr"], "generated from Unicode CLDR"),
        (
            {"dataset_name": "tester/pairs", "source_column": "translation.fr", "target_column": "translation.is"},
            ["fr", "is"],
            ["tester/pairs"],
            "[tester/pairs](https://huggingface.co/datasets/tester/pairs), split `train`",
        ),
    ],
)
def test_a_corpus_or_a_hub_data_set_names_itself(run, arguments, languages, datasets, words):
    files = {f"{split}_{side}": None for split in ("train", "validation", "test") for side in ("source", "target")}
    edit(run / "run.json", lambda record: record["arguments"].update(files | arguments))
    card = card_of(run, given=["--license", "mit"])
    assert card.data.language == languages
    assert card.data.datasets == datasets
    assert words in card.text


def test_the_folder_of_a_data_set_is_not_published_as_its_name(run, tmp_path):
    arguments = {"train_source": None, "dataset_name": str(tmp_path), "source_column": "en", "target_column": "de"}
    edit(run / "run.json", lambda record: record["arguments"].update(arguments))
    with pytest.raises(ValueError, match="datasets \\(give --datasets\\)"):
        card_of(run, given=["--license", "mit"])
    assert str(tmp_path) not in str(card_of(run))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "one embedding matrix for source, target and output)"),
        ({"tie_word_embeddings": False, "output_bias": True}, "and another for the output; biases on the output)"),
        ({"share_encoder_decoder_embeddings": False}, "for the source, and another for target and output)"),
        (
            {"parameter_sharing": "all", "num_unique_layers": 2, "embedding_size": 8},
            "embeddings of width 8; all parameters shared across layers (2 distinct in each stack, order sequence))",
        ),
    ],
)
def test_the_card_says_where_the_architecture_differs_from_the_papers(run, changes, words):
    edit(run / "run.json", lambda record: record["resolved"]["model"].update(changes))
    assert words in " ".join(card_of(run).text.split())


def test_other_weights_than_those_of_the_results_are_not_published(run, hub, capsys):
    weights = load_file(run / "best" / "model.safetensors")
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, run / "best" / "model.safetensors", {"format": "pt"}
    )
    assert "are not those that the results are of" in refusal(capsys, run, "--dry-run")


def test_options_fill_what_the_run_does_not_know(run):
    def forget(record):
        record["arguments"] |= {"train_source": "data/train.src", "train_target": "data/train.tgt"}
        record["sessions"][0]["git"] = None

    edit(run / "run.json", forget)
    card = card_of(run, "--language", "is", "fo", "--commit", "0a1b2c")
    assert card.data.language == ["is", "fo"]
    assert "Translates Icelandic to Faroese" in card.text
    assert "commit 0a1b2c" in card.text


def test_the_card_says_how_the_model_was_chosen_and_decoded(run):
    best = json.loads((run / "results.json").read_text())["best"]["update"]
    text = card_of(run).text
    assert (
        f"is the model of update {best}, which had the best validation bleu during training (5 lines, greedy)." in text
    )
    assert "decoded with 2 beams and the paper's length penalty of alpha 0.6" in text
    edit(run / "results.json", lambda results: results.pop("validation"))
    edit(run / "best" / "generation_config.json", lambda decoding: decoding.update(num_beams=1, length_penalty=None))
    text = card_of(run).text
    assert "is the model of its last update." in text
    assert "decoded greedily." in text


def test_the_card_says_what_was_done_to_the_weights_and_the_text(run):
    plain = " ".join(card_of(run).text.split())
    assert "trained from scratch with hf_vanilla_trm" in plain
    assert "| bpe_dropout | 0.0 |" in plain
    edit(run / "run.json", lambda record: record["arguments"].update(ema_decay=0.99, initial_weights="/home/me/runs"))
    text = " ".join(card_of(run).text.split())
    assert "greedy), as a moving average of the weights (decay 0.99)." in text
    assert "trained further with hf_vanilla_trm from a local model" in text
    assert "/home/me" not in text
    text = card_of(run, "--base-model", "tester/first").text
    assert "trained further with hf_vanilla_trm from [tester/first](https://huggingface.co/tester/first)" in text


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({}, GIVEN[2:], "holes that this run does not fill: license (give --license)"),
        ({}, [], "datasets (give --datasets), license (give --license)"),
        ({"train_source": "data/train.src"}, GIVEN, "language (give --language)"),
        ({"train_source": "data/train.in.txt"}, GIVEN, "language (give --language)"),
    ],
)
def test_a_hole_that_the_run_cannot_fill_is_refused_with_the_option_that_fills_it(run, capsys, change, given, message):
    edit(run / "run.json", lambda record: record["arguments"].update(change))
    assert message in refusal(capsys, run, "--dry-run", given=given)


def test_a_run_outside_a_clone_needs_the_commit_as_an_option(run, capsys):
    edit(run / "run.json", lambda record: record["sessions"][0].update(git=None))
    assert "commit (give --commit)" in refusal(capsys, run, "--dry-run")


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("{{ temperature }}", "has holes that this run does not fill: temperature"),
        ("{{ scores.flores.bleu }}", "has no attribute 'flores'"),
        ("{{ scores.test.comet }}", "has no attribute 'comet'"),
        ("{{ unclosed", "model_card.md: "),
    ],
)
def test_a_template_that_asks_for_what_the_run_did_not_produce_is_refused(
    run, capsys, monkeypatch, tmp_path, addition, message
):
    template = tmp_path / "model_card.md"
    template.write_text(card.CARD.read_text() + addition)
    monkeypatch.setattr(card, "CARD", template)
    assert message in refusal(capsys, run, "--dry-run")


def test_a_users_own_template_may_use_the_scores(run, monkeypatch, tmp_path):
    (tmp_path / "own.md").write_text("---\n{{ metadata }}\n---\n{{ scores.test.bleu }} of {{ name }}\n")
    monkeypatch.setattr(card, "CARD", tmp_path / "own.md")
    assert card_of(run).text == f"{json.loads((run / 'results.json').read_text())['test']['bleu']} of reverse\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda results: [results.pop(split) for split in ("validation", "test")],
            "does not fill: results, signatures",
        ),
        (lambda results: results["test"].update(bleu=math.nan), "no result for bleu on test: results.json says nan"),
        (lambda results: results["test"].update(chrf=None), "no result for chrf on test: results.json says None"),
        (lambda results: results["test"].pop("bleu_signature"), "the card needs: 'bleu_signature' is missing"),
        (lambda results: results.update(command="python -m other"), "not written by the run that run.json describes"),
        (lambda results: results.update(weights="0"), "are not those that the results are of"),
    ],
)
def test_results_that_the_run_did_not_produce_are_refused(run, capsys, change, message):
    edit(run / "results.json", change)
    assert message in refusal(capsys, run, "--dry-run")


def test_only_the_model_that_the_results_are_of_is_published(run, capsys, tmp_path):
    shutil.copytree(run / "best", run / "average")
    assert "are those of best/, not of average/" in refusal(capsys, run / "average")
    shutil.copytree(run / "best", tmp_path / "alone" / "best")
    assert "there is no run.json in" in refusal(capsys, tmp_path / "alone" / "best")
    assert "is not a folder" in refusal(capsys, tmp_path / "nothing")
    (run / "results.json").unlink()
    assert "there is no results.json in" in refusal(capsys, run)


@pytest.fixture
def average(run):
    """The mean of that run's checkpoints, as README makes it."""
    assert training.average_checkpoints.main(["--run", str(run), "--last", "2", "--output", str(run / "mean")]) == 0
    return run / "mean"


def score(model, data, file):
    """Write what training.score says of a model on the run's test data."""
    files = ["--model", model, "--source", data / "test.en", "--reference", data / "test.de", "--output", file]
    assert training.score.main([*map(str, files), "--bootstrap", "20", "--device", "cpu"]) == 0


def test_an_average_of_a_runs_checkpoints_is_published_with_scores_of_its_own(run, average, trained, hub, tmp_path):
    score(average, trained.parent, tmp_path / "scores.json")
    given = [*GIVEN, "--scores", str(tmp_path / "scores.json")]
    assert publish.main(["--model", str(average), "--repo", REPO, *given]) == 0
    text = ModelCard.load(REPO).content
    names = [path.name for path in sorted((run / "checkpoints").iterdir())]
    assert f"whose weights are the mean of 2 checkpoints ({names[0]}, {names[1]})" in text
    front, result = yaml.safe_load(text.split("---\n")[1]), json.loads((tmp_path / "scores.json").read_text())
    (entry,) = front["model-index"][0]["results"]  # none of best/
    assert front["metrics"] == list(result["scores"])
    assert {metric["type"]: metric["value"] for metric in entry["metrics"]} == {
        name: score["score"] for name, score in result["scores"].items()
    }
    model = AutoModelForSeq2SeqLM.from_pretrained(REPO)
    means = load_file(average / "model.safetensors")
    assert all(torch.equal(tensor, means[name]) for name, tensor in model.state_dict().items() if name in means)
    source = (run / "examples.source.txt").read_text().splitlines()[0]
    translation = model.translate(source, AutoTokenizer.from_pretrained(average))
    assert f"model.translate([{source!r}], tokenizer))  # [{translation!r}]" in text


def test_an_average_whose_origin_or_scores_are_not_its_own_is_refused(run, average, trained, capsys, tmp_path):
    assert "give scores of the average itself" in refusal(capsys, average, "--dry-run")
    score(run / "best", trained.parent, tmp_path / "best.json")
    capsys.readouterr()
    assert "are of other weights" in refusal(capsys, average, "--dry-run", "--scores", str(tmp_path / "best.json"))
    shutil.copytree(run, tmp_path / "other")
    names = [str(path) for path in (tmp_path / "other" / "checkpoints").iterdir()]
    assert training.average_checkpoints.main(["--checkpoints", *names, "--output", str(run / "mixed")]) == 0
    assert "is no mean of checkpoints of this run" in refusal(capsys, run / "mixed", "--dry-run")
    shutil.copy(run / "best" / "model.safetensors", average)
    score(average, trained.parent, tmp_path / "new.json")
    capsys.readouterr()
    assert "are not those that" in refusal(capsys, average, "--dry-run", "--scores", str(tmp_path / "new.json"))


def test_a_model_that_strangers_could_not_load_is_refused(run, capsys):
    (run / "best" / "layers.py").rename(run / "best" / "kept.py")
    (run / "best" / "modeling_vanilla_trm.py").unlink()
    assert "best lacks modeling_vanilla_trm.py, so it could not be loaded" in refusal(capsys, run)
    edit(run / "best" / "config.json", lambda config: config.pop("auto_map"))
    assert "best lacks auto_map in its config.json" in refusal(capsys, run)


# The upload --------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_files_and_card_and_asks_the_hub_nothing(run, hub, capsys):
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for path in (run / "best").iterdir():
        assert f"{path.stat().st_size:,} bytes  {path.name}\n" in shown
    assert "README.md" in shown
    assert str(card_of(run)) in shown
    assert hub.requests == []


def test_one_commit_holds_the_folder_and_the_card(run, hub, capsys):
    (run / "best" / ".DS_Store").write_text("x")
    (run / "best" / "__pycache__").mkdir()
    (run / "best" / "__pycache__" / "layers.pyc").write_text("x")
    assert publish.main(["--model", str(run / "best"), "--repo", REPO, *GIVEN]) == 0
    assert len(hub.repos[f"models/{REPO}"].commits) == 2, "the empty first one and ours"
    published = hub.files(REPO)
    wanted = {path.name: path.read_bytes() for path in (run / "best").iterdir() if path.suffix and path.is_file()}
    assert published == wanted | {"README.md": str(card_of(run)).encode()}
    assert {"layers.py", "model.safetensors", "tokenizer.json", "generation_config.json"} <= published.keys()
    assert "every weight the same" in capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(REPO)
    for name, tensor in load_file(run / "best" / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert HfApi().model_info(REPO).private is False


def test_published_again_it_makes_no_commit_and_changed_it_makes_one(run, hub):
    command = ["--model", str(run), "--repo", REPO, *GIVEN]
    assert publish.main(command) == publish.main(command) == 0
    assert len(hub.repos[f"models/{REPO}"].commits) == 2
    assert publish.main([*command, "--commit", "0a1b2c"]) == 0
    assert len(hub.repos[f"models/{REPO}"].commits) == 3
    assert b"commit 0a1b2c" in hub.files(REPO)["README.md"]


def test_private_is_private_and_never_silently_public(run, hub, capsys, monkeypatch):
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN, "--private"]) == 0
    assert hub.repos[f"models/{REPO}"].private
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="is not a local folder and is not a valid model identifier"):
        AutoTokenizer.from_pretrained(REPO)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    HfApi().create_repo("tester/seen")
    message = refusal(capsys, run, "--repo", "tester/seen", "--private")
    assert "tester/seen is there already, and public" in message
    assert hub.files("tester/seen") == {}


def test_a_branch_or_a_pull_request_gets_the_commit_and_main_stays(run, hub):
    api = HfApi()
    api.create_repo(REPO)
    api.create_branch(REPO, branch="wip/one")
    request = api.upload_file(path_or_fileobj=b"x", path_in_repo="notes.txt", repo_id=REPO, create_pr=True)
    for revision in ("wip/one", request.pr_revision):
        assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN, "--revision", revision]) == 0
        assert "model.safetensors" in hub.files(REPO, revision)
        assert AutoTokenizer.from_pretrained(REPO, revision=revision)("haus")["input_ids"][-1] == 2
    assert hub.files(REPO) == {}
    assert "notes.txt" in hub.files(REPO, request.pr_revision)


def test_a_revision_that_is_not_there_is_named_and_nothing_is_made(run, hub, capsys):
    assert "there is no repository tester/reverse" in refusal(capsys, run, "--revision", "v2")
    assert hub.repos == {}
    HfApi().create_repo(REPO)
    message = refusal(capsys, run, "--revision", "v2")
    assert "has no revision v2" in message
    assert "hf repos branch create tester/reverse v2" in message
    assert hub.files(REPO) == {}


def test_without_a_token_nothing_is_asked(run, hub, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token: set HF_TOKEN, or run `hf auth login`" in refusal(capsys, run)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_wrong", "the Hub does not know this token"),
        (READER, "no permission to write to tester/reverse"),
        (STRANGER, "no permission to write to tester/reverse"),
    ],
)
def test_a_token_that_may_not_write_is_refused_and_never_printed(run, hub, capsys, monkeypatch, caplog, token, message):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("HF_TOKEN", token)
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert token not in output.err + output.out + caplog.text
    assert hub.repos == {}
    HfApi().create_repo(REPO, token=WRITER)
    if token != "hf_wrong":
        assert message in refusal(capsys, run)
    assert hub.files(REPO) == {}


def test_a_token_is_not_printed_nor_uploaded_when_all_goes_well(run, hub, capsys, caplog):
    caplog.set_level("DEBUG")
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN]) == 0
    output = capsys.readouterr()
    assert WRITER not in output.err + output.out + caplog.text
    assert not any(WRITER.encode() in data for data in hub.files(REPO).values())


@pytest.mark.parametrize("token", ["hf_two words", "hf_tw\N{LATIN SMALL LETTER O WITH DIAERESIS}", "hf_two\x01"])
def test_a_malformed_token_is_refused_before_the_client_can_quote_it(run, hub, capsys, monkeypatch, caplog, token):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("HF_TOKEN", token)
    message = refusal(capsys, run)
    assert "the token has characters that no token has" in message
    assert "hf_tw" not in message + caplog.text
    assert hub.requests == []


def test_there_is_no_flag_for_a_token(run, capsys):
    with pytest.raises(SystemExit):
        publish.main(["--model", str(run), "--repo", REPO, *GIVEN, "--token", WRITER])
    assert "unrecognized arguments: --token" in capsys.readouterr().err


@pytest.mark.parametrize("repo", ["reverse", "a/b/c", "tester/ä", ""])
def test_a_name_that_cannot_be_a_repository_is_refused(run, capsys, repo):
    with pytest.raises(SystemExit):
        publish.main(["--model", str(run), "--repo", repo, *GIVEN])
    assert "argument --repo: " in capsys.readouterr().err


def test_without_a_network_the_error_says_so(run, hub, capsys, monkeypatch, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hub.url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        hub.connect(monkeypatch, tmp_path / "cache", WRITER)
        message = refusal(capsys, run)
    assert f"the Hub at {hub.url} cannot be reached" in message
    assert "The same command can be repeated" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "cannot be reached" in refusal(capsys, run)


@pytest.mark.parametrize("obeyed", [False, True])
def test_an_interrupted_upload_is_repeated_by_the_same_command(run, hub, capsys, obeyed):
    hub.cut_line("POST", "/commit/", after=obeyed)
    message = refusal(capsys, run)
    assert "cannot be reached" in message
    assert "The same command can be repeated" in message
    assert ("README.md" in hub.files(REPO)) is obeyed, "a commit is there as a whole or not at all"
    uploads = [path for method, path in hub.requests if method == "PUT"]
    assert len(uploads) == 1
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN]) == 0
    assert [path for method, path in hub.requests if method == "PUT"] == uploads, "the weights are not sent again"
    assert len(hub.repos[f"models/{REPO}"].commits) == 2
    assert hub.files(REPO)["model.safetensors"] == (run / "best" / "model.safetensors").read_bytes()


def test_a_line_that_is_cut_while_the_weights_go_up_leaves_nothing_behind(run, hub, capsys, monkeypatch):
    hub.cut_line("PUT", "/large/")
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN]) == 0, "the client tries again by itself"
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    for _ in range(6):
        hub.cut_line("PUT", "/large/")
    capsys.readouterr()
    hub.large.clear()
    message = refusal(capsys, run, "--repo", "tester/other")
    assert "Error while uploading 'model.safetensors' to the Hub" in message
    assert "The same command can be repeated" in message
    assert hub.files("tester/other") == {}


def other_weights(file, new):
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    tensors[name][3, 2] += 1e-6
    save_file(tensors, new, metadata={"format": "pt"})


def other_settings(file, new):
    new.write_text(json.dumps(json.loads(file.read_text()) | {"max_length_a": 0, "max_length_b": 1}))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("model.safetensors", other_weights, "fc1.weight is not that of"),
        ("generation_config.json", other_settings, "it does not translate like"),
    ],
)
def test_what_comes_back_is_compared_in_weights_and_translations(
    run, hub, capsys, monkeypatch, tmp_path, name, change, reason
):
    upload = publish.upload

    def meddle(files, card, options):
        change(files[name], tmp_path / name)
        return upload(files | {name: tmp_path / name}, card, options)

    monkeypatch.setattr(publish, "upload", meddle)
    message = refusal(capsys, run)
    assert f"{REPO} was published as {hub.repos[f'models/{REPO}'].refs['main']}, but not verified" in message
    assert reason in message


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", [None, "loss.py"])
def test_it_is_also_loaded_back_without_the_package(run, hub, capsys, monkeypatch, spoiled):
    monkeypatch.setattr(publish, "verify_as_a_stranger", VERIFY_AS_A_STRANGER)
    if spoiled:
        with (run / "best" / spoiled).open("a") as file:
            file.write("raise RuntimeError('broken')\n")
        message = refusal(capsys, run)
        assert "was published as" in message
        assert "without the package, by trust_remote_code, it cannot be loaded: RuntimeError: broken" in message
    else:
        assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN, "--private"]) == 0


@pytest.mark.parametrize("name", ["layers.py", "loss.py", "modeling_vanilla_trm.py", "tokenizer.json"])
def test_a_file_that_strangers_need_is_missed(run, capsys, name):
    (run / "best" / name).unlink()
    assert f"lacks {name}, so it could not be loaded" in refusal(capsys, run, "--dry-run")


def test_the_example_of_the_card_is_one_that_the_model_gets_right(run):
    for name, lines in (("source", "a\nb\n"), ("translation", "x\ny\n"), ("reference", "z\ny\n")):
        (run / f"examples.{name}.txt").write_text(lines)
    assert "model.translate(['b'], tokenizer)" in card_of(run).text
    assert "# ['y']" in card_of(run).text
    for name in ("source", "translation", "reference"):
        (run / f"examples.{name}.txt").unlink()
    with pytest.raises(ValueError, match="the run has no example to show"):
        card_of(run)


def test_the_run_is_only_read(run, hub):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert publish.main(["--model", str(run), "--repo", REPO, *GIVEN]) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert os.environ["HF_TOKEN"] == WRITER


# The whole story ---------------------------------------------------------------------------------------------------

STRANGER_LOADS = """
import sys
sys.modules["hf_vanilla_trm"] = None  # importing it fails
import json
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

given = json.loads(sys.stdin.read())


def load(repo):
    tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
    return AutoModelForSeq2SeqLM.from_pretrained(repo, trust_remote_code=True), tokenizer


def translate(model, tokenizer):
    batch = tokenizer(given["sources"], return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.eval().generate(**batch, max_new_tokens=9), skip_special_tokens=True)
"""
STRANGER_FINETUNES = """
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

model, tokenizer = load(given["repo"])
answer = {"published": translate(model, tokenizer)}
rows = [tokenizer(text, text_target=text) for text in given["sources"]]
arguments = Seq2SeqTrainingArguments(
    "finetuned", max_steps=3, per_device_train_batch_size=2, learning_rate=0.05, lr_scheduler_type="constant",
    use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, hub_model_id=given["own_repo"],
)
collator = DataCollatorForSeq2Seq(tokenizer, model=model)
trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
trainer.train()
answer["finetuned"] = translate(trainer.model, tokenizer)
trainer.push_to_hub()
print(json.dumps(answer))
"""
STRANGER_LOADS_AGAIN = """
print(json.dumps(translate(*load(given["own_repo"]))))
"""


@pytest.mark.slow
def test_the_whole_story_from_training_to_a_strangers_fine_tuned_model(trained, hub, tmp_path):
    """Train tiny, publish, load without the package, fine-tune there, push, load again."""
    assert publish.main(["--model", str(trained), "--repo", REPO, *GIVEN]) == 0

    given = {"repo": REPO, "own_repo": "tester/finetuned", "sources": ["der hund sieht", "haus", "baum katze haus der"]}
    environment = os.environ | hub.environment(tmp_path / "home", WRITER)

    def stranger(code):
        command = [sys.executable, "-c", STRANGER_LOADS + code]
        options = {"input": json.dumps(given), "cwd": tmp_path, "env": environment, "timeout": 300}
        process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])

    def translations(place):
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        batch = tokenizer(given["sources"], return_tensors="pt", padding=True)
        return tokenizer.batch_decode(model.eval().generate(**batch, max_new_tokens=9), skip_special_tokens=True)

    answer = stranger(STRANGER_FINETUNES)
    assert answer["published"] == translations(trained / "best")
    assert answer["finetuned"] != answer["published"], "nothing was learned"
    pushed = hub.files("tester/finetuned")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= pushed.keys()
    assert {name for name in pushed if name.endswith(".py")} == {path.name for path in trained.glob("best/*.py")}
    assert stranger(STRANGER_LOADS_AGAIN) == answer["finetuned"]
    assert translations("tester/finetuned") == answer["finetuned"], "with the package, the same"
