"""Translate lines: `python -m training.translate --model DIR < source.txt > target.txt`.

One line in, one line out, in the order of the input. A blank line stays blank and never reaches the model. Files may be
of any length: some thousands of lines are held at a time. With several processes (`torchrun --nproc_per_node 2 -m
training.translate --model DIR --input source.txt --output target.txt`, or `accelerate launch` on accelerators) each
translates a share of them. A file that was interrupted is continued by the same command with `--resume`.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice, repeat, zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_vanilla_trm import (
    BATCH_TOKENS,
    WINDOW,
    DecodingOptions,
    SamplingOptions,
    quantize,
    translate_stream,
)
from training.arguments import positive_integer
from training.launching import check_processes, cores_of_a_rank
from training.lines import read_lines
from training.loading import DTYPES, QUANTIZED, load_for_search
from training.long_sentences import join_translations
from training.run_log import weights_digest
from training.translation_output import FORMATS, OutputFile, StandardOutput, format_of
from training.translator import Translator


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(description="Translate lines, one line each.", allow_abbrev=False)
    parser.add_argument("--model", required=True, nargs="+", help="folders or Hub ids; several are an ensemble")
    parser.add_argument("--input", type=Path, help="file of source lines (default: standard input)")
    parser.add_argument("--output", type=Path, help="file for the translations (default: standard output)")
    parser.add_argument("--prefix", type=Path, help="file of lines with which the translations must begin")
    parser.add_argument("--interactive", action="store_true", help="translate what is typed, line by line")
    parser.add_argument("--resume", action="store_true", help="continue an --output that was interrupted")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="text; subword pieces; scores; n-best lists as Moses has them (line ||| text ||| score); or JSON lines, "
        "with tokens, their log-probabilities and alignments from attention (default: text)",
    )
    parser.add_argument("--n_best", type=positive_integer, default=1, help="translations a line, for nbest and json")
    search = parser.add_argument_group("search (defaults are the model's own)")
    search.add_argument("--num_beams", type=positive_integer)
    search.add_argument("--alpha", type=float, help="a score is divided by ((5 + length) / 6) ** alpha")
    search.add_argument("--max_length_a", type=float, help="cap a * source_length + b")
    search.add_argument("--max_length_b", type=int)
    search.add_argument("--min_length", type=int, help="tokens before EOS, at least (default: 1)")
    search.add_argument("--no_repeat_ngram_size", type=int, help="no n tokens in a row occur twice")
    sample = parser.add_argument_group("sampling, in place of searching")
    sample.add_argument("--sample", action="store_true")
    sample.add_argument("--temperature", type=float)
    sample.add_argument("--top_k", type=int)
    sample.add_argument("--top_p", type=float)
    sample.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--long", choices=("refuse", "split"), default="refuse", help="what becomes of lines that are too long"
    )
    parser.add_argument(
        "--max_source_length", type=positive_integer, help="most tokens of a line (default: the model's positions)"
    )
    parser.add_argument(
        "--batch_tokens", type=positive_integer, default=BATCH_TOKENS, help="source tokens times beams in a batch"
    )
    parser.add_argument("--device", type=torch.device, help="default: an accelerator if there is one")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, *QUANTIZED),
        default="fp32",
        help="precision of the weights (default: fp32); int8 is for CPUs",
    )
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what does not go together."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.n_best > 1 and options.format not in ("nbest", "json"):
        parser.error(f"--n_best {options.n_best} needs --format nbest or json: {options.format} has one for each line")
    if options.interactive and (options.input or options.output or options.prefix):
        parser.error("--interactive reads what is typed: it takes no --input, --output or --prefix")
    if options.resume and not (options.output and options.input):
        parser.error("--resume needs --input and --output: what goes through a pipe cannot be continued")
    if options.resume and options.sample:
        parser.error("--resume does not go with --sample: what is drawn depends on all that was drawn before")
    limits = (options.temperature, options.top_k, options.top_p)
    if not options.sample and any(limit is not None for limit in limits):
        parser.error("--temperature, --top_k and --top_p need --sample")
    if options.sample and (options.num_beams is not None or options.alpha is not None):
        parser.error("--num_beams and --alpha are for searching: they do not go with --sample")
    if options.num_beams is not None and options.num_beams < options.n_best:
        parser.error(f"--n_best {options.n_best} needs as many beams: --num_beams is {options.num_beams}")
    if options.format == "json" and options.long == "split":
        parser.error("--format json aligns whole lines: it does not go with --long split")
    return options


def decoding_options(options: argparse.Namespace, model: PreTrainedModel) -> DecodingOptions:
    """Return how to decode, from the command line and the model's generation config.

    Raises:
        ValueError: If a number is out of its range.
    """
    names = ("num_beams", "alpha", "max_length_a", "max_length_b", "min_length", "no_repeat_ngram_size")
    given = {name: getattr(options, name) for name in names}
    if not options.sample and given["num_beams"] is None and options.n_best > 1:
        given["num_beams"] = max(options.n_best, model.search_options().num_beams)
    chosen = model.search_options(num_hypotheses=None if options.sample else options.n_best, **given)
    if not options.sample:
        return chosen
    common = {name: getattr(chosen, name) for name in DecodingOptions.__dataclass_fields__}
    limits = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    drawn = {name: value for name, value in limits.items() if value is not None}
    return SamplingOptions(**common | drawn | {"num_hypotheses": options.n_best})


def build_translator(options: argparse.Namespace, device: torch.device | None) -> Translator:
    """Load the models.

    Raises:
        OSError: If one is not there.
        ValueError: If they do not fit together, or an option does not fit them.
    """
    loaded = [load_for_search(folder, device, (DTYPES | QUANTIZED)[options.dtype]) for folder in options.model]
    (model, tokenizer), *others = loaded
    for folder, (_, its_tokenizer) in zip(options.model, loaded, strict=True):
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"the models of an ensemble must have one vocabulary: {folder} has another")
    if options.format == "json":
        model.set_attn_implementation("eager")  # the others do not tell their probabilities
    models = [model, *(other for other, _ in others)]
    if options.dtype in QUANTIZED:
        if model.device.type != "cpu":
            raise ValueError(f"dtype ({options.dtype}) is for CPUs, and the device is {model.device}: see --device")
        models = [quantize(one, options.dtype) for one in models]
    longest = min(one.config.max_position_embeddings for one in models)
    return Translator(
        models,
        tokenizer,
        decoding_options(options, model),
        options.batch_tokens,
        options.max_source_length or longest,
        options.long == "split",
        torch.Generator(model.device).manual_seed(options.seed) if options.sample else None,
    )


def windows(lines: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield lines and prefixes, some thousands at a time."""
    lines = iter(lines)
    while window := list(islice(lines, WINDOW)):
        yield window


def translate_file(options: argparse.Namespace, state: PartialState) -> int:
    """Translate a file or standard input; return the exit code.

    Raises:
        OSError, ValueError: See `main`.
    """
    with ExitStack() as files:
        source = sys.stdin.buffer if options.input is None else files.enter_context(options.input.open("rb"))
        name = "standard input" if options.input is None else str(options.input)
        lines = read_lines(source, name)
        prefixes: Iterable[str] | None = None
        if options.prefix is not None:
            prefixes = read_lines(files.enter_context(options.prefix.open("rb")), str(options.prefix))
        check_files(options)
        output: OutputFile | StandardOutput = StandardOutput()
        if options.output is not None and state.is_main_process:
            settings = None if options.input is None or options.sample else settings_of(options)
            output = files.enter_context(OutputFile(options.output, settings, resume=options.resume))
        done = _same_on_all_ranks(output.lines_done, state)
        translator = build_translator(options, options.device or (state.device if state.num_processes > 1 else None))
        write = format_of(options.format, translator.models[0], translator.tokenizer)
        pairs = with_prefixes(lines, prefixes)
        pairs = output.skip_done(pairs) if state.is_main_process else islice(pairs, done, None)
        total = count_lines(options.input)
        bar = tqdm(total=total, initial=done, desc="Translating", unit="line", disable=not state.is_main_process)
        with bar:
            for window in windows(pairs):
                parts = [
                    translator.parts_of(*pair, f"{name}, line {number}")
                    for number, pair in enumerate(window, start=done + 1)
                ]
                found = translator.translate(parts, [prefix for _, prefix in window], state, bar)
                if state.is_main_process:
                    rows = enumerate(zip(window, found, strict=True), start=done)
                    output.write("".join(write(number, line, best) for number, ((line, _), best) in rows), window)
                done += len(window)
        if state.is_main_process:
            output.finish()
    return 0


def check_files(options: argparse.Namespace) -> None:
    """Refuse files that do not go together.

    Raises:
        ValueError: If the output is one of the inputs, there are not as many prefixes as lines, or what cannot be read
            twice should be continued.
    """
    for file in (options.input, options.prefix):
        if file is not None and options.output is not None and file.resolve() == options.output.resolve():
            raise ValueError(f"--output ({options.output}) is what is read: it would be lost")
    if options.resume and not options.input.is_file():
        raise ValueError(f"--resume needs a file: what {options.input} has given once, it will not give again")
    numbers = count_lines(options.input), count_lines(options.prefix)
    if None not in numbers and numbers[0] != numbers[1]:
        raise ValueError(f"--prefix has {numbers[1]} lines and --input {numbers[0]}: there must be equally many")


def with_prefixes(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    """Yield each line with its prefix, "" where there are none.

    Raises:
        ValueError: If there are not as many prefixes as lines.
    """
    if prefixes is None:
        yield from zip(lines, repeat(""))
        return
    for number, (line, prefix) in enumerate(zip_longest(lines, prefixes)):
        if line is None or prefix is None:
            which = "--input" if line is None else "--prefix"
            raise ValueError(f"{which} ends after {number} lines, the other goes on: there must be equally many")
        yield line, prefix


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return that on which translations depend, as it can be written: options, and digests of weights in folders."""
    left_out = ("resume", "output", "device", "interactive", "batch_tokens", "seed", "long", "max_source_length")
    settings = {name: str(value) for name, value in vars(options).items() if name not in left_out}
    folders = [Path(model) for model in options.model]
    return settings | {"weights": [weights_digest(one) if any(one.glob("*.safetensors")) else None for one in folders]}


def count_lines(file: Path | None) -> int | None:
    """Return how many lines `read_lines` will yield; None for what can be read only once."""
    if file is None or not file.is_file():
        return None
    lines, last = 0, b"\n"
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def _same_on_all_ranks(value: int, state: PartialState) -> int:
    """Return the main process's value."""
    return value if state.num_processes == 1 else int(gather_object([value])[0])


def translate_what_is_typed(options: argparse.Namespace) -> int:
    """Translate line by line until the end of input; return the exit code."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its history)
    translator = build_translator(options, options.device)
    write = format_of(options.format, translator.models[0], translator.tokenizer)
    prompt = "> " if sys.stdin.isatty() else ""
    number = 0
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return 0
        try:
            parts = translator.parts_of(line, "", "the line")
            stream = translate_stream(
                translator.models, translator.tokenizer, parts, translator.options, generator=translator.generator
            )
            print(write(number, line, join_translations(list(stream))), end="", flush=True)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        number += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate; return the exit code: 1 after an error, 130 after Ctrl-C."""
    options = parse_arguments(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        if options.interactive:
            return translate_what_is_typed(options)
        state = PartialState(cpu=not torch.accelerator.is_available() or str(options.device) == "cpu")
        check_ranks(options, state)
        if state.num_processes > 1 and state.device.type == "cpu":
            torch.set_num_threads(cores_of_a_rank())
        return translate_file(options, state)
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # the reader, `head` for one, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        resumable = options.output and options.input and not options.sample
        print(f"interrupted{'; --resume continues' if resumable else ''}", file=sys.stderr)
        return 128 + signal.SIGINT


def check_ranks(options: argparse.Namespace, state: PartialState) -> None:
    """Refuse what several processes cannot do together.

    Raises:
        ValueError: If fewer processes work together than the launcher was asked for, or they would have to share a
            pipe.
    """
    check_processes(state.num_processes, "work")
    if state.num_processes > 1 and (options.input is None or not options.input.is_file() or options.output is None):
        raise ValueError("several processes need --input and --output, files: they cannot share a pipe")
    if state.num_processes > 1 and options.device is not None and options.device.type != "cpu":
        raise ValueError(
            f"--device {options.device} would be that of all {state.num_processes} processes: leave it out"
        )


if __name__ == "__main__":
    sys.exit(main())
