"""Decoding: the paper's beam search (section 6.1), greedy search and sampling, for a batch of sources at a time.

A search knows nothing of models: it asks for the log-probabilities of the next token, and says which beams go on.
`incremental.py` has the decoder that answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """What searching and sampling have in common. Lengths count the tokens behind the start token, EOS included.

    Attributes:
        max_length_a: A translation of n source tokens has at most `max_length_a * n + max_length_b` tokens.
        max_length_b: See above; the paper's cap is n + 50.
        max_length: A cap for every translation, whatever its source; None has none.
        min_length: Least number of tokens before EOS.
        num_hypotheses: How many to return for each source.
        no_repeat_ngram_size: No hypothesis has the same n tokens in a row twice; 0 allows it.
        forbidden_tokens: That no hypothesis has.

    Raises:
        ValueError: A number is out of its range.
    """

    max_length_a: float = 1.0
    max_length_b: int = 50
    max_length: int | None = None
    min_length: int = 0
    num_hypotheses: int = 1
    no_repeat_ngram_size: int = 0
    forbidden_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("max_length_a", 0), ("min_length", 0), ("num_hypotheses", 1), ("no_repeat_ngram_size", 0)):
            if not least <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {least}, and finite")
        if min(self.forbidden_tokens, default=0) < 0:
            raise ValueError(f"forbidden_tokens ({self.forbidden_tokens}) must not hold a negative number")
        if self.max_length is not None and not self.max_length >= max(1, self.min_length):
            raise ValueError(
                f"max_length ({self.max_length}) must be at least 1 and at least min_length ({self.min_length})"
            )

    @property
    def num_beams(self) -> int:
        """Hypotheses that are followed at once."""
        return self.num_hypotheses

    def begin(self, task: "Task", generator: torch.Generator | None) -> "_Search":
        """The state of a decoding that has made no step."""
        raise NotImplementedError

    def cap_of(self, source_length: int) -> int:
        """The most tokens of a translation of so many source tokens, EOS included in both; at least one."""
        cap = int(self.max_length_a * source_length + self.max_length_b)
        return max(1, cap if self.max_length is None else min(cap, self.max_length))


@dataclass(frozen=True, kw_only=True)
class BeamSearchOptions(DecodingOptions):
    """How to search.

    At every step the `num_beams` best continuations of all beams are looked at. Those that end, with EOS or at the
    source's cap, become hypotheses; the best `num_beams` of those without EOS go on. A source is done when no beam can
    still come to a better score than the hypotheses to be returned: a log-probability can only fall, so that dividing
    it by the penalty of the cap, the largest, gives a bound. What is returned, best first, is therefore what a search
    would return that went on to the cap. With one beam, a source is done at its first hypothesis.

    Attributes:
        num_beams: Hypotheses that are followed at once; 1 is greedy search. The paper's is 4.
        alpha: Strength of the length penalty ((5 + length) / 6)^alpha, by which a log-probability is divided (Wu et
            al., 2016, equation 14). The paper's is 0.6; 0 is none.

    Raises:
        ValueError: A number is out of its range.
    """

    num_beams: int = 4
    alpha: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_beams >= self.num_hypotheses:
            raise ValueError(f"num_beams ({self.num_beams}) must be at least num_hypotheses ({self.num_hypotheses})")
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(
                f"alpha ({self.alpha}) must be at least 0, else no search could know when to end, and finite"
            )

    def begin(self, task: "Task", generator: torch.Generator | None) -> "_Search":
        """See `DecodingOptions.begin`; nothing is drawn."""
        del generator
        return _BeamSearch(task, self)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(DecodingOptions):
    """How to draw translations; each of a source's hypotheses is drawn by itself.

    They come in the order in which they were drawn. Their log-probabilities are the model's, whatever temperature and
    limits they were drawn with.

    Attributes:
        temperature: Log-probabilities are divided by it: below 1 the likely becomes likelier.
        top_k: Draw from the k likeliest tokens only; 0 draws from all.
        top_p: Draw from the likeliest tokens only that together have this probability.

    Raises:
        ValueError: A number is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature ({self.temperature}) must be more than 0")
        if not self.top_k >= 0:
            raise ValueError(f"top_k ({self.top_k}) must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be more than 0 and at most 1")

    def begin(self, task: "Task", generator: torch.Generator | None) -> "_Search":
        """See `DecodingOptions.begin`."""
        return _Sampling(task, self, generator)


class Hypothesis(NamedTuple):
    """A translation found.

    Attributes:
        tokens: Behind the start token, EOS included; a translation that was ended by its cap has none.
        score: The sum of `token_log_probs`, over the length penalty where there is one.
        token_log_probs: Of each token, given those before it.
    """

    tokens: list[int]
    score: float
    token_log_probs: list[float]


def length_penalty(length: Any, alpha: float) -> Any:
    """((5 + length) / 6)^alpha (Wu et al., 2016, equation 14), of a number or an array."""
    return ((5 + length) / 6) ** alpha


class StepModel(Protocol):
    """What a search needs of a model: a batch of sentences, each with as many beams."""

    def next_log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities `(batch, num_beams, vocab_size)` of what follows the newest tokens `(batch, num_beams)`.

        The search may write on them.
        """

    def reorder(self, parents: Tensor) -> None:
        """Go on with other beams: `parents` `(batch, num_beams)` says which of the old beams each new one extends."""

    def keep(self, sentences: Tensor) -> None:
        """Go on with some of the sentences, `(remaining,)` indices in the batch."""


@dataclass(frozen=True)
class Task:
    """What to decode.

    Attributes:
        source_lengths: Tokens of each source, EOS included.
        start_token_id: The decoder's first input.
        eos_token_id: Ends a hypothesis.
        prefixes: Tokens with which the translation of each source must begin; they count in scores and lengths.
        device: Where the model's log-probabilities are.
    """

    source_lengths: Sequence[int]
    start_token_id: int
    eos_token_id: int
    prefixes: Sequence[Sequence[int]] | None = None
    device: torch.device | str = "cpu"


LEAVING = 16
"""Sources leave a batch when one in so many is done."""


@torch.inference_mode()
def decode(
    model: StepModel, task: Task, options: DecodingOptions, generator: torch.Generator | None = None
) -> list[list[Hypothesis]]:
    """The hypotheses of every source: searched or drawn, as the options are.

    Args:
        model: Knows the sources.
        task: What to decode.
        options: How.
        generator: Draws samples; PyTorch's own by default.

    Raises:
        ValueError: A prefix breaks a rule, the model's log-probabilities are not numbers, or no token is allowed.
    """
    search = options.begin(task, generator)
    while search.sources:
        parents = search.step(model.next_log_probs(search.tokens))
        if int(search.done.sum()) * LEAVING >= len(search.sources):
            remaining = torch.from_numpy(without(search.done)).to(task.device)
            search.keep(remaining)
            if not search.sources:
                break
            model.keep(remaining)
            parents = parents[remaining]
        model.reorder(parents)
    return search.results


def without(done: np.ndarray) -> np.ndarray:
    """The places of what is not done, so that as few as possible are elsewhere afterwards: the last fill the gaps.

    Args:
        done: `(batch,)`.

    Returns:
        `(remaining,)`: what stands at the places 0, 1, ... from now on.
    """
    remaining = np.arange(np.count_nonzero(~done))
    gaps = np.flatnonzero(done[: len(remaining)])
    remaining[gaps] = len(remaining) + np.flatnonzero(~done[len(remaining) :])
    return remaining


class _Search:
    """What searching and sampling keep of their beams: tensors on the device, arrays on the host, all with a row
    for each source that has not left.

    Attributes:
        sources: Their places in the batch that was given.
        tokens: The newest token of each beam, `(batch, num_beams)`.
        history: All of its tokens, `(batch, num_beams, length)`, where something asks for them.
        caps: `(batch,)`, an array.
        done: Whether a source has all its hypotheses, `(batch,)`, an array; its beams go on without a meaning until it
            leaves.
        length: Steps made.
        results: Hypotheses of every source that was given, once it is done.
    """

    rows: tuple[str, ...] = ("tokens", "history", "caps", "done")
    """Names of the tensors and arrays."""

    def __init__(self, task: Task, options: DecodingOptions) -> None:
        self.task, self.options = task, options
        shape = len(task.source_lengths), options.num_beams
        check_prefixes(task, options)
        self.sources = list(range(shape[0]))
        self.results: list[list[Hypothesis]] = [[] for _ in self.sources]
        self.length = 0
        self.caps = np.array([options.cap_of(length) for length in task.source_lengths])
        self.done = np.zeros(shape[0], dtype=bool)
        self.tokens = torch.full(shape, task.start_token_id, device=task.device)
        self.history = self.tokens.new_empty((*shape, 0))

    def step(self, log_probs: Tensor) -> Tensor:
        """Extend the beams by one token.

        Args:
            log_probs: `(batch, num_beams, vocab_size)`.

        Returns:
            Which of the old beams each beam extends, `(batch, num_beams)`.
        """
        raise NotImplementedError

    def keep(self, remaining: Tensor) -> None:
        """Go on with some of the sources, `(remaining,)` indices in the batch."""
        places = remaining.cpu().numpy()
        self.sources = [self.sources[place] for place in places]
        for name in self.rows:
            value = getattr(self, name)
            setattr(self, name, value[remaining if isinstance(value, Tensor) else places])

    def allowed(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities with -inf for what options forbid at this step; a prefix forbids all but its own token.

        They are written where they stand, unless several beams stand at one place.
        """
        forbidden = set(self.options.forbidden_tokens)
        if self.length <= self.options.min_length:
            forbidden.add(self.task.eos_token_id)
        if forbidden:
            if max(forbidden) >= log_probs.size(-1):
                raise ValueError(f"a forbidden token is {max(forbidden)}, of a vocabulary of {log_probs.size(-1)}")
            log_probs = log_probs.contiguous()
            log_probs[..., sorted(forbidden)] = NEVER
        free = log_probs
        if self.options.no_repeat_ngram_size:
            log_probs = without_repeated_ngrams(log_probs, self.history, self.options.no_repeat_ngram_size)
        forced = self._forced_tokens()
        if forced is None:
            return log_probs
        if int(forced.max()) >= log_probs.size(-1):
            raise ValueError(f"a prefix has token {int(forced.max())}, of a vocabulary of {log_probs.size(-1)}")
        index = forced.clamp(min=0).view(-1, 1, 1).expand(-1, log_probs.size(1), 1)
        only = torch.full_like(free, NEVER).scatter(2, index, free.gather(2, index))
        return torch.where((forced >= 0).view(-1, 1, 1), only, log_probs)

    def _forced_tokens(self) -> Tensor | None:
        """The token that each source's prefix has at this step, `(batch,)`, -1 where it has none; None if none has."""
        prefixes, place = self.task.prefixes, self.length - 1
        if prefixes is None or all(len(prefixes[source]) <= place for source in self.sources):
            return None
        tokens = [prefixes[source][place] if place < len(prefixes[source]) else -1 for source in self.sources]
        return torch.tensor(tokens, device=self.tokens.device)


class Continuations(NamedTuple):
    """The best continuations of the beams of each source, best first, each `(batch, number)`.

    Attributes:
        totals: Log-probabilities of the whole beams.
        parents: Which of the beams each extends.
        tokens: By which token.
    """

    totals: Any
    parents: Any
    tokens: Any


class _Step(NamedTuple):
    """What a step of a beam search leaves for telling a hypothesis from its last token, as arrays.

    Attributes:
        rows: Of every source that was given, as long as it has one.
        parents: Which of the old beams each beam extends, `(batch, num_beams)`.
        tokens: By which token, `(batch, num_beams)`.
        log_probs: Of that token, `(batch, num_beams)`.
    """

    rows: dict[int, int]
    parents: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray


class _End(NamedTuple):
    """The last token of a hypothesis; `parent` is the beam, of the steps before, that it extends."""

    score: float
    length: int
    parent: int
    token: int
    log_prob: float


class _BeamSearch(_Search):
    """The state of a search; see `BeamSearchOptions`. All but the choice among the vocabulary happens on the host.

    Attributes:
        totals: The log-probability of each beam, `(batch, num_beams)`; -inf where there is none.
        worst: The score of the last of the hypotheses wanted, `(batch,)`; -inf until there are as many.
        penalty_at_cap: `(batch,)`.
        row_of: The row of each source that has not left.
        steps: All that were made.
        ends: Of the hypotheses found so far for every source that was given, the best first.
    """

    rows = (*_Search.rows, "totals", "worst", "penalty_at_cap")

    def __init__(self, task: Task, options: BeamSearchOptions) -> None:
        super().__init__(task, options)
        self.alpha = options.alpha
        self.totals = np.full(self.tokens.shape, NEVER)
        self.totals[:, 0] = 0.0  # all beams are alike at first: one of them is enough
        self.worst = np.full(self.caps.shape, NEVER)
        self.penalty_at_cap = length_penalty(self.caps, self.alpha)
        self.row_of = {source: row for row, source in enumerate(self.sources)}
        self.steps: list[_Step] = []
        self.ends: list[list[_End]] = [[] for _ in self.sources]

    def step(self, log_probs: Tensor) -> Tensor:
        """See `_Search.step`."""
        beams = self.options.num_beams
        self.length += 1
        totals = torch.as_tensor(self.totals, dtype=log_probs.dtype, device=log_probs.device)
        best = best_continuations(totals, self.allowed(log_probs), 2 * beams)
        places = best.parents * log_probs.size(-1) + best.tokens
        of_tokens: np.ndarray = log_probs.flatten(1).gather(1, places).cpu().numpy()
        found = Continuations(*(tensor.cpu().numpy() for tensor in best))
        _check((found.totals[:, 0] > NEVER) | self.done)
        at_cap, is_eos = self.caps <= self.length, found.tokens == self.task.eos_token_id
        ended = (is_eos | at_cap[:, None])[:, :beams] & (found.totals[:, :beams] > NEVER)
        self._collect(ended, found, of_tokens)
        # Among twice as many as there are beams, no more than one for each beam ends with EOS.
        going_on = np.argsort(is_eos, axis=1, kind="stable")[:, :beams]
        kept = [np.take_along_axis(array, going_on, axis=1) for array in (*found[1:], of_tokens)]
        self.steps.append(_Step(self.row_of, *kept))
        self.totals = np.take_along_axis(np.where(is_eos, NEVER, found.totals), going_on, axis=1)
        self.done |= at_cap | (self.worst >= self.totals[:, 0] / self.penalty_at_cap)
        if beams == 1:
            self.done |= self.worst > NEVER
        self.totals[self.done] = NEVER  # nothing more comes of these beams, and they stay done
        followed = torch.from_numpy(kept[0]).to(log_probs.device)
        self.tokens = torch.from_numpy(kept[1]).to(log_probs.device)
        if self.options.no_repeat_ngram_size:
            self.history = torch.cat((_of_beams(self.history, followed), self.tokens.unsqueeze(-1)), dim=-1)
        return followed

    def _collect(self, ended: np.ndarray, found: Continuations, of_tokens: np.ndarray) -> None:
        """Take up the continuations that are marked in `ended` `(batch, num_beams)`; `of_tokens` are the tokens'
        log-probabilities.
        """
        penalty, wanted = length_penalty(self.length, self.alpha), self.options.num_hypotheses
        for row, place in np.argwhere(ended).tolist():
            ends, score = self.ends[self.sources[row]], float(found.totals[row, place]) / penalty
            if len(ends) == wanted and score <= ends[-1].score:
                continue
            at = row, place
            parent, token = int(found.parents[at]), int(found.tokens[at])
            ends.append(_End(score, self.length, parent, token, float(of_tokens[at])))
            ends.sort(key=lambda end: -end.score)  # stable: of equals, the first stays first
            del ends[wanted:]
            if len(ends) == wanted:
                self.worst[row] = ends[-1].score

    def keep(self, remaining: Tensor) -> None:
        """See `_Search.keep`; what the others have found is told now."""
        for source in set(self.sources).difference(self.sources[place] for place in remaining.tolist()):
            self.results[source] = [self._hypothesis(source, end) for end in self.ends[source]]
        super().keep(remaining)
        self.row_of = {source: row for row, source in enumerate(self.sources)}

    def _hypothesis(self, source: int, end: _End) -> Hypothesis:
        """The hypothesis that has this end, by going back from beam to beam."""
        tokens, log_probs, beam = [end.token], [end.log_prob], end.parent
        for step in reversed(self.steps[: end.length - 1]):
            at = step.rows[source], beam
            tokens.append(int(step.tokens[at]))
            log_probs.append(float(step.log_probs[at]))
            beam = step.parents[at]
        return Hypothesis(tokens[::-1], end.score, log_probs[::-1])


class _Sampling(_Search):
    """The state of sampling.

    Attributes:
        ended: Which hypotheses have, `(batch, num_hypotheses)`; they wait for the source's others.
    """

    rows = (*_Search.rows, "token_log_probs", "ended", "lengths")

    def __init__(self, task: Task, options: SamplingOptions, generator: torch.Generator | None) -> None:
        super().__init__(task, options)
        self.sampling, self.generator = options, generator
        self.token_log_probs = torch.zeros(self.history.shape, device=task.device)
        self.ended = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.lengths = torch.zeros_like(self.tokens)

    def step(self, log_probs: Tensor) -> Tensor:
        """See `_Search.step`."""
        self.length += 1
        probabilities = filter_top_k_top_p(self.allowed(log_probs), self.sampling).softmax(dim=-1)
        _check((probabilities.isfinite().all(dim=-1) | self.ended).cpu().numpy())
        probabilities = probabilities.masked_fill(self.ended.unsqueeze(-1), 1.0)  # what follows has no meaning
        tokens = torch.multinomial(probabilities.flatten(0, 1), 1, generator=self.generator).view(self.tokens.shape)
        parents = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        self.history = torch.cat((self.history, tokens.unsqueeze(-1)), dim=-1)
        new = log_probs.gather(2, tokens.unsqueeze(-1))
        self.token_log_probs = torch.cat((self.token_log_probs.to(new.dtype), new), dim=-1)
        self.lengths = torch.where(self.ended, self.lengths, self.length)
        at_cap = torch.from_numpy(self.caps <= self.length).to(tokens.device)
        self.ended = self.ended | (tokens == self.task.eos_token_id) | at_cap.unsqueeze(1)
        self.tokens = tokens
        done_before, self.done = self.done, self.ended.all(dim=1).cpu().numpy()
        for row in np.flatnonzero(self.done & ~done_before).tolist():
            for place, length in enumerate(self.lengths[row].tolist()):
                log_probs_of = self.token_log_probs[row, place, :length].tolist()
                hypothesis = Hypothesis(self.history[row, place, :length].tolist(), sum(log_probs_of), log_probs_of)
                self.results[self.sources[row]].append(hypothesis)
        return parents


def filter_top_k_top_p(log_probs: Tensor, options: SamplingOptions) -> Tensor:
    """Log-probabilities `(..., vocab_size)`, no longer normalised, at a temperature, with -inf outside of top-k and
    top-p.
    """
    log_probs = log_probs / options.temperature
    if options.top_k:
        least = log_probs.topk(min(options.top_k, log_probs.size(-1)), dim=-1).values[..., -1:]
        log_probs = log_probs.masked_fill(log_probs < least, NEVER)
    if options.top_p < 1:
        probabilities, order = log_probs.softmax(dim=-1).sort(dim=-1, descending=True)
        enough_before = probabilities.cumsum(dim=-1) - probabilities >= options.top_p
        log_probs = log_probs.masked_fill(enough_before.scatter(-1, order, enough_before), NEVER)
    return log_probs


def check_prefixes(task: Task, options: DecodingOptions) -> None:
    """Refuse prefixes that no translation could begin with.

    Raises:
        ValueError: They are not one for each source, one is longer than its source's cap lets it be, or one holds EOS,
            a forbidden token or what is no token.
    """
    if task.prefixes is None:
        return
    if len(task.prefixes) != len(task.source_lengths):
        raise ValueError(f"there are {len(task.prefixes)} prefixes for {len(task.source_lengths)} sources")
    for source, (prefix, length) in enumerate(zip(task.prefixes, task.source_lengths, strict=True)):
        if len(prefix) >= options.cap_of(length):
            raise ValueError(
                f"the prefix of source {source} has {len(prefix)} tokens, and its translation at most "
                f"{options.cap_of(length)}"
            )
        if {task.eos_token_id, *options.forbidden_tokens}.intersection(prefix) or min(prefix, default=0) < 0:
            raise ValueError(
                f"the prefix of source {source} holds EOS, a forbidden token or a negative number: {list(prefix)}"
            )


GROUP = 128
"""Neighbouring tokens of which only the likeliest is compared with others at first; a whole number of registers."""


def best_continuations(totals: Tensor, log_probs: Tensor, number: int) -> Continuations:
    """The best continuations of all beams of each source, best first.

    The maximum of a group of tokens costs little more than reading it, and no more than `number` groups can hold the
    best: only their tokens are sorted.

    Args:
        totals: Of the beams, `(batch, num_beams)`.
        log_probs: Of the next token, `(batch, num_beams, vocab_size)`.
        number: How many are wanted; fewer are returned where there are fewer.
    """
    batch, beams, vocab_size = log_probs.shape
    groups = vocab_size // GROUP
    if beams * groups < 2 * number:
        values, places = (log_probs + totals.unsqueeze(-1)).flatten(1).topk(min(number, beams * vocab_size), dim=1)
        return Continuations(values, places // vocab_size, places % vocab_size)
    of_groups = log_probs[..., : groups * GROUP].unflatten(-1, (groups, GROUP)).amax(dim=-1) + totals.unsqueeze(-1)
    chosen = of_groups.flatten(1).topk(number, dim=1).indices
    grouped = groups * GROUP
    within = torch.arange(GROUP, device=chosen.device)
    left_over = torch.arange(grouped, vocab_size, device=chosen.device)
    beam_of = torch.cat(
        (
            (chosen // groups).repeat_interleave(GROUP, dim=1),
            torch.arange(beams, device=chosen.device).repeat_interleave(len(left_over)).expand(batch, -1),
        ),
        dim=1,
    )
    tokens = torch.cat(
        (((chosen % groups * GROUP).unsqueeze(-1) + within).flatten(1), left_over.repeat(beams).expand(batch, -1)),
        dim=1,
    )
    values = log_probs.flatten(1).gather(1, beam_of * vocab_size + tokens) + totals.gather(1, beam_of)
    best, order = values.topk(number, dim=1)
    return Continuations(best, beam_of.gather(1, order), tokens.gather(1, order))


def without_repeated_ngrams(log_probs: Tensor, history: Tensor, size: int) -> Tensor:
    """Log-probabilities with -inf for every token that would complete an n-gram that its beam has already.

    Args:
        log_probs: `(batch, num_beams, vocab_size)`.
        history: Tokens of the beams, `(batch, num_beams, length)`.
        size: The n of the n-grams.
    """
    length = history.size(-1)
    if length < size:
        return log_probs
    windows = history.unfold(-1, size, 1)  # (batch, num_beams, length - size + 1, size)
    newest = history[..., length - size + 1 :].unsqueeze(-2)
    repeats = (windows[..., :-1] == newest).all(dim=-1)
    nothing = windows.new_full((), log_probs.size(-1))
    forbidden = torch.where(repeats, windows[..., -1], nothing)
    padded = nn.functional.pad(log_probs, (0, 1))  # an extra column takes the mark where no n-gram repeats
    return padded.scatter(-1, forbidden, NEVER)[..., :-1]


def _of_beams(tensor: Tensor, beams: Tensor) -> Tensor:
    """`tensor` `(batch, num_beams, length)` for other beams, `(batch, number)`: `(batch, number, length)`."""
    return tensor.gather(1, beams.unsqueeze(-1).expand(-1, -1, tensor.size(-1)))


def _check(usable: np.ndarray) -> None:
    if not usable.all():
        raise ValueError("no token has a probability: the model's outputs are not finite, or all tokens are forbidden")
