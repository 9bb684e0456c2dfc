"""A page that translates and shows what attends to what: `python -m training.demo --model DIR_OR_HUB_ID`.

With `--space DIR` it writes the folder of a Hub Space instead, which has the same page. This file and `attention.py`
are all of `training` that a Space holds, so they import nothing else of it but in `main`, which a Space does not call.
"""

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported: it tells nobody of the page

import gradio as gr
import PIL.Image
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.attention import KINDS, AttentionMaps, attention_maps, draw_kind

MOST_TOKENS = 120
"""A sentence or translation of more has no picture: nobody could read it."""
MOST_PIXELS = 4000
"""Width and height of a picture, at most."""
HEADERS = ["rank", "translation", "score", "log-probability"]


# What the page shows -------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A row of the n-best list.

    Attributes:
        text: The translation.
        score: Its log-probability over the length penalty.
        log_probability: The sum over its tokens.
        tokens: Behind the start token, EOS included.
    """

    text: str
    score: float
    log_probability: float
    tokens: list[int]


@dataclass(frozen=True)
class Found:
    """A sentence with its translations, the best first."""

    source: str
    candidates: list[Candidate]

    def rows(self) -> list[list[Any]]:
        """Return the n-best list under `HEADERS`."""
        return [
            [rank, one.text, round(one.score, 3), round(one.log_probability, 3)]
            for rank, one in enumerate(self.candidates, start=1)
        ]


@dataclass(frozen=True)
class Demo:
    """What stands behind the page.

    Attributes:
        model: One of this package, in evaluation mode.
        tokenizer: Its own.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def search(self, source: str, num_hypotheses: int, num_beams: int, alpha: float) -> Found:
        """Return the n-best list of a sentence, by the paper's beam search.

        All that is not given is as the model's generation config says.

        Raises:
            ValueError: If the sentence is blank or longer than the model's positions, or a number breaks a rule, as
                more hypotheses than beams do.
        """
        if not source.strip():
            raise ValueError("the sentence is blank: type one to translate")
        batch = self.tokenizer(source, return_tensors="pt", verbose=False).to(self.model.device)
        length, most = batch.input_ids.size(1), self.model.config.max_position_embeddings
        if length > most:
            raise ValueError(f"the sentence has {length} tokens: the model's max_position_embeddings are {most}")
        options = self.model.search_options(num_hypotheses=num_hypotheses, num_beams=num_beams, alpha=alpha)
        (hypotheses,) = self.model.search(batch.input_ids, batch.attention_mask, **vars(options))
        texts = self.tokenizer.batch_decode([one.tokens for one in hypotheses], skip_special_tokens=True)
        candidates = [
            Candidate(text, one.score, sum(one.token_log_probs), one.tokens)
            for text, one in zip(texts, hypotheses, strict=True)
        ]
        return Found(source, candidates)

    def attention(self, found: Found, rank: int) -> AttentionMaps:
        """Return the attention of the hypothesis of a rank, counted from 1."""
        return attention_maps(self.model, self.tokenizer, found.source, found.candidates[rank - 1].tokens)

    def picture(self, found: Found, rank: int, kind: str, mean_over_heads: bool) -> PIL.Image.Image:
        """Return the attention of the hypothesis of a rank as a picture.

        Raises:
            ValueError: If the sentence or the hypothesis has more than `MOST_TOKENS`.
        """
        maps = self.attention(found, rank)
        for name, tokens in (("sentence", maps.source), ("translation", maps.target)):
            if len(tokens) > MOST_TOKENS:
                raise ValueError(f"the {name} has {len(tokens)} tokens: attention is drawn up to {MOST_TOKENS}")
        figure = draw_kind(maps, kind, mean_over_heads=mean_over_heads)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=min(120, MOST_PIXELS / max(figure.get_size_inches())))
        return PIL.Image.open(file)

    # The page calls these; what a reader of the page has done wrong, it says there.

    def on_translate(
        self, source: str, num_hypotheses: float, num_beams: float, alpha: float, kind: str, mean_over_heads: bool
    ) -> tuple[str, list[list[Any]], PIL.Image.Image | None, Found, int]:
        """Return the translation, the n-best list, a picture of the best, and what the page remembers of it."""
        try:
            found = self.search(source, int(num_hypotheses), int(num_beams), alpha)
        except ValueError as error:
            raise gr.Error(str(error), title="This cannot be translated", print_exception=False) from error
        return found.candidates[0].text, found.rows(), self.on_draw(found, 1, kind, mean_over_heads), found, 1

    def on_draw(self, found: Found | None, rank: int, kind: str, mean_over_heads: bool) -> PIL.Image.Image | None:
        """Return the picture of the hypothesis chosen; None, and a warning, where it would be too large."""
        if found is None:
            return None
        try:
            return self.picture(found, rank, kind, mean_over_heads)
        except ValueError as error:
            gr.Warning(str(error), title="No picture")
            return None

    def on_choose(
        self, found: Found | None, kind: str, mean_over_heads: bool, event: gr.SelectData
    ) -> tuple[PIL.Image.Image | None, int]:
        """Return the picture of the row that was clicked, and its rank."""
        rank = int(event.row_value[0])  # its place on the screen may be another: the table can be sorted
        return self.on_draw(found, rank, kind, mean_over_heads), rank


# The page ------------------------------------------------------------------------------------------------------------


def build_page(demo: Demo, title: str, examples: Sequence[str] = ()) -> gr.Blocks:
    """Return the page.

    Args:
        demo: Answers it.
        title: Stands above; the model's name.
        examples: Sentences that a click puts into the box.
    """
    defaults = demo.model.search_options()
    with gr.Blocks(title=title, analytics_enabled=False) as page:
        gr.Markdown(f"# Translate\n\nwith `{title}`")
        found, rank = gr.State(None), gr.State(1)
        source = gr.Textbox(label="Sentence", max_lines=1, autofocus=True, elem_id="source")
        if examples:
            gr.Examples([[example] for example in examples], source, label="Examples")
        with gr.Row():
            numbers = {"minimum": 1, "maximum": max(16, defaults.num_beams), "step": 1}
            hypotheses = gr.Slider(value=defaults.num_beams, label="Hypotheses (num_hypotheses)", **numbers)
            beams = gr.Slider(value=defaults.num_beams, label="Beam size (num_beams)", **numbers)
            alpha = gr.Slider(0, max(2, defaults.alpha), defaults.alpha, step=0.05, label="Length penalty (alpha)")
        button = gr.Button("Translate", variant="primary", elem_id="translate")
        translation = gr.Textbox(label="Translation", interactive=False, elem_id="translation", buttons=["copy"])
        table = gr.Dataframe(
            label="n-best list: click a row to see its attention",
            headers=HEADERS,
            datatype=["number", "str", "number", "number"],
            interactive=False,
            wrap=True,
            elem_id="n_best",
        )
        with gr.Row():
            kind = gr.Radio(_kinds(), value="cross", label="Attention", scale=3)
            mean = gr.Checkbox(label="Mean over heads", scale=1)
        # Without gradio's button for sharing, which sends the picture to a server.
        buttons: Any = ["download", "fullscreen"]
        picture = gr.Image(label="Attention", format="png", interactive=False, elem_id="attention", buttons=buttons)

        # One at a time: matplotlib draws in one thread.
        on: Callable[..., Any] = partial(gr.on, concurrency_limit=1, concurrency_id="model")
        on(
            [button.click, source.submit],
            demo.on_translate,
            [source, hypotheses, beams, alpha, kind, mean],
            [translation, table, picture, found, rank],
            api_name="translate",
        )
        private = {"api_visibility": "private"}
        on([kind.change, mean.change], demo.on_draw, [found, rank, kind, mean], picture, **private)
        on([table.select], demo.on_choose, [found, kind, mean], [picture, rank], **private)
    return page


def _kinds() -> list[tuple[str, str]]:
    """Return the kinds of attention as the page names them, the most telling first, each with its key."""
    names = {"cross": "cross-attention", "encoder": "encoder self-attention", "decoder": "decoder self-attention"}
    return [(names[kind], kind) for kind in sorted(KINDS, key=list(names).index)]


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    title: str,
    examples: Sequence[str] = (),
    **how: Any,
) -> None:
    """Show the page until the process is interrupted.

    Args:
        model: See `Demo`.
        tokenizer: See `Demo`.
        title: See `build_page`.
        examples: See `build_page`.
        **how: Arguments of gradio's `launch`.

    Raises:
        OSError: If the port is taken.
    """
    page = build_page(Demo(model, tokenizer), title, examples)
    page.launch(footer_links=[], ssr_mode=False, **how)


# The command ---------------------------------------------------------------------------------------------------------


def examples_of(model: str) -> list[str]:
    """Return the sentences that a training run wrote beside its best model, if the model is one of a run's."""
    file = Path(model).resolve().parent / "examples.source.txt"
    if not Path(model).is_dir() or not file.is_file():
        return []
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the page, or write a Space; return the exit code."""
    parser = argparse.ArgumentParser(description="Translate in a browser.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or Hub id of a model with tokenizer")
    parser.add_argument("--port", type=int, help="of the server (default: the first free one from 7860)")
    parser.add_argument("--share", action="store_true", help="also give it a public address, through gradio's servers")
    parser.add_argument(
        "--space", type=Path, metavar="DIR", help="write the folder of a Hub Space for a model on the Hub instead"
    )
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        if options.space is not None:
            from training.space import write_space

            for file in write_space(options.model, options.space):
                print(file)
            return 0
        from training.loading import load_for_search

        model, tokenizer = load_for_search(options.model)
        serve(
            model, tokenizer, options.model, examples_of(options.model), server_port=options.port, share=options.share
        )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
