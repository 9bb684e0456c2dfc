"""The page: what stands behind it, its API, the page itself in a real browser, and the Space that has the same page."""

import ast
import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import gradio as gr
import pytest
import torch
import yaml
from gradio_client import Client
from gradio_client.exceptions import AppError
from huggingface_hub import HfApi, ModelCard
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from transformers import GenerationConfig

from tests import browser
from tests.conftest import tiny_model
from tests.hub import WRITER, Hub
from training import demo, space, translate
from training.tokenizer import train_tokenizer

ROOT = Path(__file__).parent.parent
TEXTS = ["Ein Hund läuft", "Zwei Kinder spielen im Park"]
TOO_LONG = "Hund " * 90
SAVED = {"max_length_a": 0.5, "max_length_b": 4, "no_repeat_ngram_size": 1}
"""How the model searches, besides beams: short translations, which differ in more than their last token."""
SECONDS = 180

# gradio's own, where pandas is of version 3.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting'")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder, whose model writes nothing but letters."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=320)
    model = tiny_model(vocab_size=len(tokenizer), encoder_layers=3, max_position_embeddings=60)
    tokens = range(len(tokenizer))
    others = [[token] for token in tokens if token != 2 and not tokenizer.decode([token]).isalpha()]
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    model.generation_config = GenerationConfig(
        **special, **SAVED, num_beams=4, length_penalty=0.6, bad_words_ids=others
    )
    model.save_pretrained(folder / "best")
    tokenizer.save_pretrained(folder / "best")
    (folder / "examples.source.txt").write_text("Ein Park\n\nZwei Kinder\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def page(run):
    return demo.Demo(*translate.load_for_search(str(run / "best"), "cpu"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def serving(command, cwd, **environment):
    """Run a command that shows a page, and yield the page's address once it can be reached."""
    port = free_port()
    variables = {"GRADIO_SERVER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = Path(cwd) / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=os.environ | variables | environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + SECONDS
            while "Running on local URL" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


# Behind the page -----------------------------------------------------------------------------------------------------


def test_the_n_best_list_is_that_of_search_with_the_sliders_and_the_generation_config(page):
    model, tokenizer = page.model, page.tokenizer
    found = page.search(TEXTS[1], num_hypotheses=3, num_beams=5, alpha=1.0)
    forbidden = tuple(token for (token,) in model.generation_config.bad_words_ids)
    saved = SAVED | {"min_length": 1, "forbidden_tokens": forbidden}
    input_ids = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    (expected,) = model.search(input_ids, num_hypotheses=3, num_beams=5, alpha=1.0, **saved)
    assert [one.tokens for one in found.candidates] == [one.tokens for one in expected]
    for candidate, hypothesis in zip(found.candidates, expected, strict=True):
        assert candidate.score == hypothesis.score
        penalty = (5 + len(candidate.tokens)) / 6
        assert candidate.score == pytest.approx(candidate.log_probability / penalty)
        assert candidate.text == tokenizer.decode(candidate.tokens, skip_special_tokens=True)
    scores = [row[2] for row in found.rows()]
    assert scores == sorted(scores, reverse=True)
    assert [row[0] for row in found.rows()] == [1, 2, 3]


def test_the_best_is_what_translate_gives(page):
    found = page.search(TEXTS[0], num_hypotheses=4, num_beams=4, alpha=0.6)
    assert found.candidates[0].text == page.model.translate(TEXTS[0], page.tokenizer)


def test_attention_is_that_of_the_chosen_hypothesis(page):
    found = page.search(TEXTS[0], num_hypotheses=4, num_beams=4, alpha=0.6)
    source_length = len(page.tokenizer(TEXTS[0]).input_ids)
    for rank, candidate in enumerate(found.candidates, start=1):
        maps = page.attention(found, rank)
        assert maps.cross.shape == (2, 2, len(candidate.tokens), source_length)
        for probabilities in (maps.encoder, maps.decoder, maps.cross):
            torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:-1]))
        assert maps.target == ["<s>", *(page.tokenizer.decode([token]) for token in candidate.tokens[:-1])]


def test_every_hypothesis_and_every_kind_has_a_picture_of_its_own(page):
    found = page.search(TEXTS[0], num_hypotheses=2, num_beams=4, alpha=0.6)
    choices = [(1, "cross", False), (2, "cross", False), (1, "encoder", False), (1, "decoder", False)]
    choices.append((1, "cross", True))
    pictures = {page.picture(found, *choice).tobytes() for choice in choices}
    assert len(pictures) == len(choices)


def test_a_picture_has_a_largest_size(page, monkeypatch):
    found = page.search(TEXTS[0], num_hypotheses=1, num_beams=1, alpha=0.6)
    monkeypatch.setattr(demo, "MOST_PIXELS", 200)
    assert max(page.picture(found, 1, "cross", False).size) <= 201
    monkeypatch.setattr(demo, "MOST_TOKENS", 3)
    with pytest.raises(ValueError, match=r"the sentence has \d+ tokens: attention is drawn up to 3"):
        page.picture(found, 1, "cross", False)


@pytest.mark.parametrize(
    ("source", "num_hypotheses", "num_beams", "message"),
    [
        (" \t", 1, 1, "the sentence is blank"),
        (TOO_LONG, 1, 1, r"the sentence has \d+ tokens: the model's max_position_embeddings are 60"),
        ("Hund", 5, 4, r"num_beams \(4\) must be at least num_hypotheses \(5\)"),
    ],
)
def test_what_breaks_a_rule_is_said_in_the_page(page, source, num_hypotheses, num_beams, message):
    with pytest.raises(gr.Error, match=message) as raised:
        page.on_translate(source, num_hypotheses, num_beams, 0.6, "cross", False)
    assert not raised.value.print_exception, "the server's log has no stack trace either"


def test_the_examples_are_those_of_the_run(run, tmp_path):
    assert demo.examples_of(str(run / "best")) == ["Ein Park", "Zwei Kinder"]
    assert demo.examples_of(str(tmp_path)) == []
    assert demo.examples_of("user/name") == []


def test_a_model_that_is_not_there_is_an_error_in_a_line(capsys, tmp_path):
    assert demo.main(["--model", str(tmp_path / "nothing")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: there is no model in")
    assert "Traceback" not in message


def test_a_port_that_is_taken_is_an_error_in_a_line(capsys, run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert demo.main(["--model", str(run / "best"), "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err.removeprefix("error: ")


# The API -------------------------------------------------------------------------------------------------------------


def test_the_api_answers_like_the_model(page):
    blocks = demo.build_page(page, "model", TEXTS)
    _, url, _ = blocks.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False, server_port=free_port())
    try:
        client = Client(url, verbose=False)
        translation, table, picture = client.predict(TEXTS[1], 3, 4, 0.6, "cross", False, api_name="/translate")
        assert translation == page.model.translate(TEXTS[1], page.tokenizer)
        assert table["headers"] == demo.HEADERS
        assert table["data"] == page.search(TEXTS[1], 3, 4, 0.6).rows()
        assert Path(picture["path"] if isinstance(picture, dict) else picture).stat().st_size > 0
        with pytest.raises(AppError, match="the sentence is blank"):
            client.predict(" ", 3, 4, 0.6, "cross", False, api_name="/translate")
    finally:
        blocks.close()


# The page in a browser -----------------------------------------------------------------------------------------------


class Visitor:
    """What someone does with the page, and sees of it."""

    def __init__(self, driver, url):
        self.driver = driver
        self.wait = WebDriverWait(driver, SECONDS, ignored_exceptions=[StaleElementReferenceException])
        driver.get(url)
        self.see("#source input")

    def see(self, selector):
        """The first element, once it is there."""
        return self.wait.until(lambda driver: (driver.find_elements("css selector", selector) or [None])[0])

    def translate(self, text):
        self.see("#source input").send_keys(Keys.CONTROL, "a", Keys.NULL, text)
        self.see("#translate").click()

    def translation(self):
        box = self.see("#translation textarea, #translation input")
        return self.wait.until(lambda _: box.get_attribute("value"))

    def rows(self):
        """The text of the n-best list, cell by cell."""
        script = "return [...document.querySelectorAll('#n_best [data-row]')].map(e => [+e.dataset.row, e.innerText])"
        rows = {}
        for row, text in self.driver.execute_script(script):
            rows.setdefault(row, []).append(text.strip())
        return [rows[row] for row in sorted(rows)]

    def picture(self, other_than=None):
        """The address of the heat map, once it is shown, and is another."""

        def shown(driver):
            for image in driver.find_elements("css selector", "#attention img"):
                if image.get_property("naturalWidth") and image.get_attribute("src") != other_than:
                    return image.get_attribute("src")
            return None

        return self.wait.until(shown)


@pytest.mark.slow
def test_a_visitor_translates_chooses_and_is_told_what_is_wrong(run, page, tmp_path):
    if lacking := browser.missing():
        pytest.skip(f"{' and '.join(lacking)} not found: python -m tests.browser says why it could not be installed")
    command = [sys.executable, "-m", "training.demo", "--model", str(run / "best")]
    with serving(command, tmp_path, PYTHONPATH=str(ROOT)) as url, contextlib.closing(browser.start()) as driver:
        visitor = Visitor(driver, url)
        visitor.translate(TEXTS[1])
        assert visitor.translation() == page.model.translate(TEXTS[1], page.tokenizer)
        first = visitor.picture()
        expected = page.search(TEXTS[1], 4, 4, 0.6).rows()
        visitor.wait.until(lambda _: len(visitor.rows()) == 4)
        assert visitor.rows() == [[str(cell) for cell in row] for row in expected]

        visitor.see("#n_best [data-row='1']").click()
        second = visitor.picture(other_than=first)
        visitor.see("#n_best [data-row='0']").click()
        assert visitor.picture(other_than=second) == first

        visitor.translate(" ")
        visitor.wait.until(lambda driver: "the sentence is blank" in driver.find_element("tag name", "body").text)
        assert visitor.translation(), "what was there is still there"
        assert browser.hosts_requested(driver) == {"127.0.0.1"}


# The Space -----------------------------------------------------------------------------------------------------------


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_space_holds_what_it_needs_and_no_more(tmp_path, capsys):
    assert demo.main(["--model", "user/name", "--space", str(tmp_path / "space")]) == 0
    own = {"app.py", "README.md", "requirements.txt"}
    assert names_in(tmp_path / "space") == own | set(space.CODE)
    assert len(capsys.readouterr().out.splitlines()) == len(own | set(space.CODE))
    for name in space.CODE:
        assert (tmp_path / "space" / name).read_bytes() == (ROOT / name).read_bytes()
    front = yaml.safe_load((tmp_path / "space" / "README.md").read_text().split("---\n")[1])
    assert front == {
        "title": "Translate with name",
        "sdk": "gradio",
        "sdk_version": gr.__version__,
        "app_file": "app.py",
        "models": ["user/name"],
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    wanted = (tmp_path / "space" / "requirements.txt").read_text().splitlines()
    assert [line.partition(">=")[0] for line in wanted] == ["torch", "transformers", "gradio", "matplotlib"]
    assert set(wanted) - set(stated) == set(project["optional-dependencies"]["demo"])


def test_what_a_space_holds_imports_nothing_else_of_training_when_it_is_imported():
    for name in space.CODE:
        for node in ast.parse((ROOT / name).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("training"):
                assert f"{node.module.replace('.', '/')}.py" in space.CODE


@pytest.mark.parametrize(
    ("model", "message"),
    [("name", "USER/NAME, which 'name' is not"), ("runs/mine/best", "Repo id must"), (".", "Repo id must")],
)
def test_a_space_needs_a_model_on_the_hub(tmp_path, capsys, model, message):
    assert demo.main(["--model", model, "--space", str(tmp_path / "space")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "space").exists()


def test_a_space_is_not_written_over_anything(tmp_path, capsys):
    (tmp_path / "app.py").write_text("mine")
    assert demo.main(["--model", "user/name", "--space", str(tmp_path)]) == 1
    assert f"{tmp_path} is not empty" in capsys.readouterr().err
    assert names_in(tmp_path) == {"app.py"}


def test_a_space_has_the_licence_of_the_models_card(tmp_path, monkeypatch):
    with Hub() as server:
        server.connect(monkeypatch, tmp_path / "cache", WRITER)
        HfApi().create_repo("tester/model")
        assert "license" not in space.front_matter("tester/model")
        ModelCard("---\nlicense: cc-by-4.0\n---\n").push_to_hub("tester/model")
        assert space.front_matter("tester/model")["license"] == "cc-by-4.0"
        with pytest.raises(OSError, match="there is no model tester/other on the Hub"):
            space.front_matter("tester/other")


STRANGER = """
import importlib.util, runpy, sys
from pathlib import Path
sys.modules["hf_vanilla_trm"] = None  # importing it fails
import training
assert Path(training.__file__).parent.parent == Path.cwd(), training.__file__
assert importlib.util.find_spec("training.translate") is None
runpy.run_path("app.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_space_works_where_there_is_nothing_of_this_project(run, page, tmp_path):
    space.write_space("user/name", tmp_path / "space")
    app = tmp_path / "space" / "app.py"
    app.write_text(app.read_text().replace('"user/name"', repr(str(run / "best"))))
    nothing = {"PYTHONPATH": "", "HF_HOME": str(tmp_path / "hf_home")}
    with serving([sys.executable, "-c", STRANGER], tmp_path / "space", **nothing) as url:
        translation, table, _ = Client(url, verbose=False).predict(
            TEXTS[0], 2, 4, 0.6, "cross", True, api_name="/translate"
        )
    assert translation == page.model.translate(TEXTS[0], page.tokenizer)
    assert [row[:2] for row in table["data"]] == [row[:2] for row in page.search(TEXTS[0], 2, 4, 0.6).rows()]
