"""Policies as models of lm-eval: log-likelihoods, and texts that end where a task says.

Needs lm-eval (`pip install 'jaxrl_llm[eval]'`), but no torch:

    lm_eval.simple_evaluate(HarnessLM(Policy.from_pretrained("qwen2.5-0.5b")), tasks=["gsm8k"])
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxrl_llm.masking import bucket_length, padded
from jaxrl_llm.models.transformer import LanguageModel, Params
from jaxrl_llm.policy import Policy
from jaxrl_llm.sampling import Dialogue, Reply, SamplingConfig, sample_dialogue
from jaxrl_llm.tokenizers import TokenBytes, tokens_to_bytes
from jaxrl_llm.types import Completions, ConfigError, Prompts

DEFAULT_MAX_LENGTH = 2048  # as lm-eval's, where a tokenizer does not say
LOOK_EVERY = 8  # tokens between two looks for a text that ends a completion
MAX_LOGITS = 2**24  # that exist at once in scoring: 64 MB

_logger = logging.getLogger(__name__)


class Stops(NamedTuple):
    """Texts of which each ends a completion, padded with zeros; an empty one never does."""

    text: UInt8[Array | np.ndarray, "N M"]
    length: Int[Array | np.ndarray, "N"]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Stops":
        """Rounded up to a few shapes, each of which is compiled once."""
        encoded = [text.encode() for text in texts]
        n, m = -(-max(len(texts), 1) // 4) * 4, -(-max(map(len, encoded), default=1) // 16) * 16
        table, length = np.zeros((n, m), np.uint8), np.zeros(n, np.int32)
        for i, text in enumerate(encoded):
            table[i, : len(text)], length[i] = np.frombuffer(text, np.uint8), len(text)
        return cls(table, length)


def contains(text: UInt8[Array, "K"], n_bytes: Int[Array, ""], stops: Stops) -> Bool[Array, ""]:
    """Whether one of the stops occurs in the first `n_bytes` of a text."""
    starts, within = jnp.arange(len(text)), jnp.arange(stops.text.shape[1])
    parts = jnp.pad(text, (0, len(within)))[starts[:, None] + within[None, :]]
    is_equal = parts[:, None, :] == stops.text[None]
    is_equal |= within[None, None, :] >= stops.length[None, :, None]
    fits = starts[:, None] + stops.length[None, :] <= n_bytes
    return (is_equal.all(-1) & fits & (stops.length > 0)[None, :]).any()


@partial(jax.jit, static_argnames=("model", "config", "eos_ids", "pad_id"))
def complete(
    params: Params,
    prompts: Prompts,
    keys: Key[Array, "B"],
    stops: Stops,
    token_bytes: TokenBytes,
    *,
    model: LanguageModel,
    config: SamplingConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
) -> Int[Array, "B T"]:
    """One completion of each prompt, sampled until its text contains a stop, or until an end token.

    Every `LOOK_EVERY` tokens each text is searched for the stops, by an environment of the sampling
    loop that says nothing: so the loop ends soon after the last row, whatever T is, and up to that
    many tokens after a stop are sampled in vain.
    """
    shape = len(keys), 1
    ends = jnp.asarray(eos_ids, jnp.int32).reshape(1, 1, 1, -1)

    def read(tokens: Int[Array, "S"]) -> Bool[Array, ""]:
        size = len(tokens) * token_bytes.table.shape[1]
        return contains(*tokens_to_bytes(tokens, tokens >= 0, token_bytes, size), stops)

    def reply(recent: Int[Array, "B 1 S"], turns: Int[Array, "B 1 A"], t: Array) -> Reply:
        del t
        recent = jnp.concatenate([recent[..., turns.shape[-1] :], turns], -1)
        is_over = (turns[..., None] == ends).any((-1, -2)) | jax.vmap(jax.vmap(read))(recent)
        nothing = Prompts(jnp.zeros((*shape, 1), jnp.int32), jnp.zeros((*shape, 1), bool))
        return Reply(recent, nothing, jnp.zeros(shape), is_over, {})

    # A stop of M bytes is at most M tokens long.
    recent = jnp.full((*shape, stops.text.shape[1] + LOOK_EVERY), -1, jnp.int32)
    completions, _ = sample_dialogue(
        params,
        model,
        prompts,
        keys[:, None],
        config,
        Dialogue(reply, recent, LOOK_EVERY),
        eos_ids=eos_ids,
        pad_id=pad_id,
    )
    return completions.tokens[:, 0]


@partial(jax.jit, static_argnames="model")
def score(
    params: Params, prompts: Prompts, completions: Completions, *, model: LanguageModel
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    """log π(completion | prompt) in nats, and whether each of its tokens is the most likely one."""
    head = model.head(params)

    def score_token(position):
        hidden, token = position
        logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(logits)[token], logits.argmax() == token

    hidden = model.completion_hidden(params, prompts, completions)
    flat = hidden.reshape(-1, hidden.shape[-1]), completions.tokens.reshape(-1)
    chunk = max(1, MAX_LOGITS // head.shape[1])
    logp, is_best = jax.lax.map(score_token, flat, batch_size=chunk)
    mask = completions.loss_mask[:, 0]
    logp, is_best = logp.reshape(mask.shape), is_best.reshape(mask.shape)
    return jnp.where(mask, logp, 0.0).sum(-1), (is_best | ~mask).all(-1)


class HarnessLM(TemplateLM):
    """A policy as lm-eval asks for a model, with the conventions of its Hugging Face model.

    Requests are sorted by length, and computed in batches of one shape: a text is padded up to the
    next of few lengths, and a batch to `batch_size` rows. So what a request gets depends on nothing
    but itself: not on the requests beside it, and, but for rounding, not on `batch_size`. What is
    sampled (`do_sample`) depends on the seed, the request, and how often it was asked before within
    the call. What is longer than `max_length` loses its beginning, with a warning.

    Args:
        policy: what is evaluated.
        batch_size: rows computed at once.
        max_length: longest text in tokens, prompt and answer together; by default what the
            tokenizer says, or else 2048.
        max_gen_toks: longest answer in tokens, where a task does not say.
        seed: of what is sampled.

    Raises:
        ConfigError: a size below 1, or a request that the policy cannot answer.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
    ):
        super().__init__()
        if min(batch_size, max_gen_toks, 1 if max_length is None else max_length) < 1:
            raise ConfigError(
                f"batch_size={batch_size}, max_length={max_length}, max_gen_toks={max_gen_toks}: "
                "expected at least 1 of each"
            )
        self.policy, self.batch_size, self.max_gen_toks = policy, batch_size, max_gen_toks
        # That of transformers, which lm-eval reads the chat template of; None for built-in ones.
        self.tokenizer: Any = getattr(policy.tokenizer, "tokenizer", None)
        self.max_length = max_length or _max_length(self.tokenizer)
        self._key = jax.random.key(seed)
        self._token_bytes = jax.tree.map(jnp.asarray, policy.tokenizer.token_bytes)
        # Llama's tokenizer begins every text with a token, others do not.
        theirs: Any = self.tokenizer
        self._begins = bool(theirs and theirs.bos_token_id in theirs.encode(""))

    @property
    def eot_token_id(self) -> int:
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return self.policy.tokenizer.eos_ids[0] if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text is predicted from."""
        names = (self.tokenizer, "bos_token_id"), (self.policy.tokenizer, "bos_id")
        begin = next((i for x, name in names if (i := getattr(x, name, None)) is not None), None)
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """A digest of the vocabulary and the chat template."""
        told = self.policy.tokenizer.token_bytes.table, getattr(self.tokenizer, "chat_template", "")
        return hashlib.sha256(np.asarray(told[0]).tobytes() + repr(told[1]).encode()).hexdigest()[
            :16
        ]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        del kwargs
        ids = self.policy.tokenizer.encode(string)
        begin = [self.prefix_token_id]
        adds = self._begins and add_special_tokens is not False and ids[:1] != begin
        return begin + ids if adds else ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as a text; without a system's turn where the template has none.

        Raises:
            ConfigError: the tokenizer has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "this tokenizer has no chat template: expected an instruction-tuned model; leave "
                "the chat template away for others"
            )
        from jinja2 import TemplateError

        write = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return write(chat_history)
        except TemplateError:
            _logger.warning("the chat template refuses the system's turn: it is left out")
            return write([turn for turn in chat_history if turn["role"] != "system"])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        owners: list[int] = []
        windows: list[Any] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                owners.append(i)
                windows.append((None, *make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for i, (logp, _) in zip(owners, scored, strict=True):
            totals[i] += logp
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        del kwargs
        shapes: list[tuple[int, int]] = []
        texts: list[tuple[list[int], list[int]]] = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"an answer to be scored has {len(continuation)} tokens: expected at most "
                    f"max_length={self.max_length}"
                )
            # The last token of a text is predicted, and not read.
            kept = context[-(self.max_length + 1 - len(continuation)) :]
            texts.append((kept, continuation))
            shapes.append((self._bucket(kept), self._bucket(continuation)))
        self._warn_of_cuts(
            len(a) - len(b) for (_, a, _), (b, _) in zip(requests, texts, strict=True)
        )
        results = [(0.0, True)] * len(requests)
        for (p, t), rows in self._batches(shapes, "log-likelihoods", disable_tqdm):
            prompts = padded([texts[i][0] for i in rows], p)
            after = padded([texts[i][1] for i in rows], t, from_left=False)
            tokens, mask = after.tokens[:, None], after.mask[:, None]
            completions = Completions(tokens, mask, mask, jnp.zeros(tokens.shape))
            logps, is_best = score(
                self.policy.params, prompts, completions, model=self.policy.model
            )
            for i, logp, is_greedy in zip(rows, logps.tolist(), is_best.tolist(), strict=True):
                results[i] = logp, is_greedy
                if requests[i][0] is not None:  # else it is a part of a text
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def _bucket(self, ids: list[int]) -> int:
        return min(bucket_length(len(ids)), self.max_length)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        plans, prompts, keys, n_cut = [], [], [], []
        asked: Counter[str] = Counter()
        for request in requests:
            args: Any = request.args
            context, gen_kwargs = args
            until, config = self._settings(gen_kwargs)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            limit = self.max_length - config.max_tokens
            if limit < 1:
                raise ConfigError(
                    f"max_gen_toks={config.max_tokens} leaves no room for a prompt: expected less "
                    f"than max_length={self.max_length}"
                )
            prompts.append(ids[-limit:])
            n_cut.append(len(ids) - len(prompts[-1]))
            plans.append((min(bucket_length(len(prompts[-1])), limit), config, until))
            said = repr((context, sorted(gen_kwargs.items())))
            keys.append(jax.random.fold_in(self._key, _digest(f"{said}{asked[said]}")))
            asked[said] += 1
        self._warn_of_cuts(n_cut)
        results = [""] * len(requests)
        for plan, rows in self._batches(plans, "texts", disable_tqdm):
            p, config, until = plan
            ends = self._end_ids(until)
            tokens = complete(
                self.policy.params,
                padded([prompts[i] for i in rows], p),
                jnp.stack([keys[i] for i in rows]),
                Stops.of(until),
                self._token_bytes,
                model=self.policy.model,
                config=config,
                eos_ids=ends,
                pad_id=self.policy.tokenizer.pad_id,
            )
            for i, ids in zip(rows, tokens.tolist(), strict=True):
                results[i] = self._cut(ids, ends, until)
                self.cache_hook.add_partial("generate_until", requests[i].args, results[i])
        return results

    def _settings(self, gen_kwargs: dict[str, Any]) -> tuple[tuple[str, ...], SamplingConfig]:
        """The texts that end an answer, and how it is sampled."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        until = [stop for stop in kwargs.pop("until") if stop]
        if self.tokenizer is not None:  # an end token that is spelled out
            until.append(self.tokenizer.decode([self.eot_token_id]))
        temperature = kwargs.pop("temperature", 1.0)
        is_greedy = not kwargs.pop("do_sample") or temperature == 0
        config = SamplingConfig(
            max_tokens=kwargs.pop("max_gen_toks"),
            greedy=is_greedy,
            temperature=1.0 if is_greedy else temperature,
            top_k=kwargs.pop("top_k", None) or None,
            top_p=kwargs.pop("top_p", None),
            block=LOOK_EVERY,
        )
        if kwargs.pop("num_beams", 1) != 1 or kwargs:
            raise ConfigError(
                f"generation settings {gen_kwargs}: expected no others than until, max_gen_toks, "
                "do_sample, temperature, top_k and top_p"
            )
        return tuple(dict.fromkeys(until)), config

    def _end_ids(self, until: Sequence[str]) -> tuple[int, ...]:
        """The tokens that end an answer: a stop may name a special one, which has no text."""
        ends = dict.fromkeys(self.policy.tokenizer.eos_ids)
        if self.tokenizer is not None:
            named = [self.policy.tokenizer.encode(stop) for stop in until]
            length = self.policy.tokenizer.token_bytes.length
            ends |= dict.fromkeys(ids[0] for ids in named if len(ids) == 1 and not length[ids[0]])
        return tuple(ends)

    def _cut(self, ids: list[int], ends: Sequence[int], until: Sequence[str]) -> str:
        """The text before whatever ends it first."""
        n = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        text = self.policy.tokenizer.decode(ids[:n])
        return text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=None)]

    def _batches(
        self, shapes: Sequence[Hashable], what: str, disable_tqdm: bool
    ) -> Iterator[tuple[Any, list[int]]]:
        """Requests of one shape, the largest first; the last one fills up a batch."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, shape in enumerate(shapes):
            groups[shape].append(i)
        with tqdm(total=len(shapes), disable=disable_tqdm or None, desc=what) as progress:
            for shape in sorted(groups, key=lambda shape: shape[0], reverse=True):
                for begin in range(0, len(groups[shape]), self.batch_size):
                    rows = groups[shape][begin : begin + self.batch_size]
                    yield shape, rows + rows[-1:] * (self.batch_size - len(rows))
                    progress.update(len(rows))

    def _warn_of_cuts(self, n_cut: Any) -> None:
        cut = [n for n in n_cut if n > 0]
        if cut:
            _logger.warning(
                "%d texts do not fit into max_length=%d: they lose their first tokens, %d at most",
                len(cut),
                self.max_length,
                max(cut),
            )


def _max_length(tokenizer: Any) -> int:
    told = getattr(tokenizer, "model_max_length", None)
    return int(told) if told and told < 2**31 else DEFAULT_MAX_LENGTH  # 10³⁰ is "not known"


def _digest(text: str) -> np.uint32:
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)[0]
