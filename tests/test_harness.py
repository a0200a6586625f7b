"""Policies as models of lm-eval, against direct scoring and the sampler without stops."""

import functools
import logging
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM

from jaxrl_llm.harness import HarnessLM, Stops, contains
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.policy import Policy
from jaxrl_llm.tokenizers import CharTokenizer
from jaxrl_llm.types import ConfigError, Prompts

TOKENIZER = CharTokenizer(string.printable, ["the", "and"])
CONFIG = ModelConfig(width=16, layers=2, heads=2)
PAIRS = [
    ("Question: what is 2 and 2?", " the answer is 4"),
    ("a", "b"),
    ("", "no context"),
    ("ends in spaces  ", "so they belong to the answer"),
    ("Question: what is 2 and 3?", " 5"),
    ("x" * 50, "y" * 30),
]
TEXTS = ["abc", "Question: 1 + 1\nAnswer:", "the and the", "", "z" * 40]


@pytest.fixture(scope="module")
def policy():
    """Weights larger than usual: fresh ones repeat one token."""
    fresh = Policy.from_scratch(CONFIG, tokenizer=TOKENIZER, seed=1)
    return fresh.with_params(jax.tree.map(lambda x: 4.0 * x, fresh.params))


@pytest.fixture(scope="module")
def lm(policy):
    return HarnessLM(policy, batch_size=2, max_length=128)


def requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def asked(lm, texts=TEXTS, **gen_kwargs):
    given = {"until": [], "max_gen_toks": 17} | gen_kwargs
    return lm.generate_until(requests("generate_until", *((text, given) for text in texts)))


@functools.partial(jax.jit, static_argnames="model")
def all_logps(params, tokens, *, model):
    prompts = Prompts(tokens, jnp.ones_like(tokens, bool))
    context = model.prompt_context(prompts)
    hidden = model.module.apply({"params": params}, tokens[:, None], None, context)[0]
    return jax.nn.log_softmax(hidden[0, 0] @ model.head(params))


def logps_of(policy, ids):
    """log π of what follows each token, by one pass; what is padded comes after all of them."""
    tokens = jnp.array([ids + [0] * (160 - len(ids))])
    return np.array(all_logps(policy.params, tokens, model=policy.model))[: len(ids)]


def test_the_likelihood_of_an_answer_is_that_of_its_tokens(lm, policy):
    for (context, answer), (logp, is_greedy) in zip(
        PAIRS, lm.loglikelihood(requests("loglikelihood", *PAIRS)), strict=True
    ):
        stripped = context.rstrip()
        before = TOKENIZER.encode(stripped) or [TOKENIZER.bos_id]
        after = TOKENIZER.encode(context[len(stripped) :] + answer)
        logps = logps_of(policy, before + after)[len(before) - 1 : -1]
        assert logp == pytest.approx(logps[np.arange(len(after)), after].sum(), abs=2e-4)
        assert is_greedy == (logps.argmax(-1) == after).all()


def test_what_the_policy_would_say_is_greedy_and_one_other_token_makes_it_not(lm, policy):
    ids = TOKENIZER.encode("The sum")
    said = []
    for _ in range(6):
        logps = logps_of(policy, ids + said)[-1]
        logps[:3] = -np.inf  # special tokens have no text
        said.append(int(logps.argmax()))
    answer = TOKENIZER.decode(said)
    other = answer[:-1] + ("a" if answer[-1] != "a" else "b")
    logps = logps_of(policy, ids + said)[len(ids) - 1 : -1]
    is_best = (logps.argmax(-1) == said).all()  # no special token is likelier
    scored = lm.loglikelihood(requests("loglikelihood", ("The sum", answer), ("The sum", other)))
    assert [is_greedy for _, is_greedy in scored] == [is_best, False] == [True, False]


def test_a_rolling_likelihood_adds_up_windows_that_predict_each_token_once(policy):
    short = HarnessLM(policy, batch_size=2, max_length=8)
    text = "Question: what is the sum of 2 and 2?"
    ids = TOKENIZER.encode(text)
    fed = [TOKENIZER.bos_id, *ids]
    expected = 0.0
    for start in range(0, len(ids), 8):
        end = min(start + 8, len(ids))
        first = max(0, end - 8)  # the last window has the longest context that there is room for
        logps = logps_of(policy, fed[first:end])
        expected += sum(logps[i - first][ids[i]] for i in range(start, end))
    rolled = short.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("",), ("a",)))
    assert rolled[0] == pytest.approx(expected, abs=2e-4)
    assert rolled[1] == 0.0
    assert rolled[2] == pytest.approx(
        logps_of(policy, [TOKENIZER.bos_id])[0][TOKENIZER.encode("a")[0]], abs=2e-4
    )


def first(texts, stop):
    """The texts up to where one would first be cut."""
    return [text.split(stop)[0] for text in texts]


def test_an_answer_ends_before_the_first_text_that_ends_it(lm):
    free = asked(lm)
    assert all(len(text) > 12 for text in free)
    stops = [free[1][9:12], free[3][4:6], "never said", ""]
    cut = asked(lm, until=stops)
    places = [[at for stop in stops[:3] if (at := text.find(stop)) >= 0] for text in free]
    assert cut == [text[: min(at, default=None)] for text, at in zip(free, places, strict=True)]
    assert 0 < len(cut[1]) <= 9 and len(cut[3]) <= 4 and sum(map(bool, places)) >= 2
    assert asked(lm, until=stops[0]) == first(free, stops[0])  # one stop needs no list


def test_sampling_ends_soon_after_every_text_has_its_stop(policy, monkeypatch):
    """By what the sampler fills with padding: it stopped, whatever the longest answer is."""
    import jaxrl_llm.harness as harness

    lm, made = HarnessLM(policy, batch_size=2, max_length=256), []

    def spy(*args, **kwargs):
        made.append(np.asarray(complete(*args, **kwargs)))
        return made[-1]

    complete = harness.complete
    monkeypatch.setattr(harness, "complete", spy)
    texts = [TEXTS[0], TEXTS[2]]
    free = asked(lm, texts, max_gen_toks=100)
    stops = [free[0][18:20], free[1][2:4]]
    assert asked(lm, texts, until=stops, max_gen_toks=100) == [
        text[: min(at for stop in stops if (at := text.find(stop)) >= 0)] for text in free
    ]
    endless, ended = made
    assert (endless[:, 40:] != TOKENIZER.pad_id).any(0).all()
    assert (ended[:, 32:] == TOKENIZER.pad_id).all()


def test_a_stop_is_found_across_tokens_and_only_as_a_whole():
    stops = Stops.of(["ab", "", "xyz"])

    def found(text, n=None):
        padded = np.frombuffer(text.encode().ljust(12, b"\0"), np.uint8)
        return bool(contains(jnp.asarray(padded), jnp.int32(n or len(text)), stops))

    assert found("ab") and found("..ab.") and found("0123456789ab") and found("..xyz")
    assert not (found("a.b") or found("..a") or found("xy") or found("") or found(".ab", n=2))
    assert not contains(jnp.zeros(12, jnp.uint8), jnp.int32(12), Stops.of([]))


def test_an_answer_is_no_longer_than_asked_for(lm):
    long, short = asked(lm), asked(lm, max_gen_toks=5)
    for a, b in zip(long, short, strict=True):
        ids = TOKENIZER.encode(a)
        assert len(ids) > 5 and b == TOKENIZER.decode(ids[:5])


def test_results_do_not_depend_on_the_order_of_requests_or_on_the_batch_size(policy, lm):
    def everything(lm, order):
        settings = {"do_sample": True, "temperature": 0.8}
        texts = [("abc", "the and the", "", "b", "c and d")[i] for i in order]
        greedy = asked(lm, texts, max_gen_toks=9)
        drawn = asked(lm, texts, max_gen_toks=9, **settings)
        pairs = [PAIRS[i] for i in order]
        scores = lm.loglikelihood(requests("loglikelihood", *pairs))
        back = np.argsort(order)
        return [[x[i] for i in back] for x in (greedy, drawn, scores)]

    one, other = (everything(lm, order) for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]))
    assert one == other
    wide = everything(HarnessLM(policy, batch_size=5, max_length=128), [0, 1, 2, 3, 4])
    assert wide[:2] == one[:2]
    np.testing.assert_allclose(wide[2], one[2], atol=2e-4)


def test_sampling_depends_on_the_seed_and_on_how_often_one_asks(policy, lm):
    settings = {"do_sample": True, "temperature": 1.0}
    twice = asked(lm, ["abc", "abc"], **settings)
    assert twice[0] != twice[1] and twice == asked(lm, ["abc", "abc"], **settings)
    assert asked(HarnessLM(policy, batch_size=2, max_length=128, seed=1), ["abc"], **settings) != [
        twice[0]
    ]
    assert asked(lm, ["abc"], do_sample=True, temperature=0.0) == asked(lm, ["abc"])


def test_what_is_too_long_loses_its_beginning_with_a_warning(policy, caplog):
    lm = HarnessLM(policy, batch_size=2, max_length=40)
    long = "the begin" * 9 + "ning of the end"
    kept = TOKENIZER.decode(TOKENIZER.encode(long)[-23:])
    with caplog.at_level(logging.WARNING):
        cut, whole = asked(lm, [long, kept])
    assert cut == whole and "1 texts do not fit into max_length=40" in caplog.text
    answer = "y" * 30
    ((logp, _),) = lm.loglikelihood(requests("loglikelihood", (long, answer)))
    before = TOKENIZER.encode(long)[-11:]
    after = TOKENIZER.encode(answer)
    logps = logps_of(policy, before + after)[10:-1]
    assert logp == pytest.approx(logps[np.arange(30), after].sum(), abs=2e-4)


def test_the_cache_of_lm_eval_answers_what_was_asked_before(lm, policy, tmp_path, monkeypatch):
    cached = CachingLM(HarnessLM(policy, batch_size=2, max_length=128), str(tmp_path / "c.db"))
    first = asked(cached, TEXTS[:3]), cached.loglikelihood(requests("loglikelihood", *PAIRS[:3]))
    monkeypatch.setattr("jaxrl_llm.harness.complete", None)
    monkeypatch.setattr("jaxrl_llm.harness.score", None)
    again = asked(cached, TEXTS[:3]), cached.loglikelihood(requests("loglikelihood", *PAIRS[:3]))
    monkeypatch.undo()
    assert first == again
    assert first == (asked(lm, TEXTS[:3]), lm.loglikelihood(requests("loglikelihood", *PAIRS[:3])))


def test_what_cannot_be_answered_is_refused_in_one_line(policy, lm):
    for action, message in (
        (lambda: HarnessLM(policy, batch_size=0), "batch_size=0"),
        (lambda: asked(lm, max_gen_toks=128), "max_gen_toks=128 leaves no room"),
        (lambda: asked(lm, num_beams=4), "expected no others than until"),
        (lambda: lm.loglikelihood(requests("loglikelihood", ("a", "b" * 129))), "129 tokens"),
        (lambda: lm.apply_chat_template([]), "no chat template"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)
