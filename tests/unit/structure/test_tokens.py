"""Classes of tokens against the plain table, the bytes of tokenizers, the cache, and a cancelled compilation."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dinfer.structure import (
    NEVER,
    Cancelled,
    Compiler,
    ConstraintError,
    Limits,
    Vocabulary,
    choice,
    json_object,
    regex,
    vocabulary_of,
)  # fmt: skip
from dinfer.structure.automaton import build
from dinfer.structure.language import check, language
from dinfer.structure.regex import parse


def vocabulary(*texts: bytes | None, strips_space: bool = False) -> Vocabulary:
    end = len(texts)
    return Vocabulary([*texts, None, None], frozenset({end}), frozenset({end, end + 1}), strips_space)


@pytest.mark.parametrize("pattern", ["(ab|ba)*", "[^a]{0,9}a", r"\d+(\.\d+)?|é*", "", ".*"])
def test_classes_are_the_plain_table(pattern: str) -> None:
    rng, automaton = random.Random(0), build(parse(pattern))
    texts = {bytes(rng.choice(b"ab01.\xc3\xa9") for _ in range(rng.randrange(1, 7))) for _ in range(300)}
    tokens = vocabulary(*sorted(texts), None, b"")
    found = language(automaton, tokens)
    for state in range(automaton.states):
        want = [automaton.run(text, state) if text else -1 for text in tokens.bytes_V]
        want[-2] = found.end if automaton.final[state] else -1
        assert found.next_QC[state][found.class_V].tolist() == want
    ends = found.next_QC[found.end][found.class_V]
    assert np.flatnonzero(ends >= 0).tolist() == [len(tokens.bytes_V) - 2, len(tokens.bytes_V) - 1]
    rows = {tuple(column) for column in found.next_QC.T.tolist()}
    assert len(rows) >= found.classes - 1  # no two classes are alike, but for one that may have no token
    assert [int(found.class_V[t]) for t in found.token_C if t >= 0] == [
        c for c, t in enumerate(found.token_C) if t >= 0
    ]
    pairs = {(q, to) for q, _, to in found.edges_E3.tolist()}
    assert pairs == set(map(tuple, found.pairs_P2.tolist())) == set(map(tuple, found.pairs_by_next_P2.tolist()))


def test_distances_count_tokens() -> None:
    found = language(build(parse("abcabc|x")), vocabulary(b"abc", b"a", b"b", b"c"))
    assert found.shortest == 2
    assert found.distance_Q[found.automaton.run(b"x")] == 0
    assert NEVER not in found.distance_Q.tolist()
    with pytest.raises(ConstraintError, match="spells"):
        language(build(parse("é")), vocabulary(b"a"))


def test_a_space_that_decoding_drops_may_stand_first() -> None:
    tokens = vocabulary(b" a", b"a", b" ", strips_space=True)
    found = Compiler(tokens).compile(regex("a a"))
    assert [found.automaton.accepts(text) for text in (b" a a", b"a a", b"  a a")] == [True, True, False]


def fast(model: Any, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_level() -> PreTrainedTokenizerFast:
    words = {char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"])}
    tokenizer = fast(models.BPE(words, [("Ġ", "a")]), decoders.ByteLevel(), eos_token="<eos>")
    tokenizer.add_tokens(["<tool_call>"])
    return tokenizer


def test_byte_level_bpe() -> None:
    found = vocabulary_of(byte_level(), 300, stop=[257], never=[5])
    assert found.bytes_V[256:260] == [b" a", None, b"<tool_call>", None]
    assert found.bytes_V[5] is None and found.bytes_V[0] == b"!"
    assert len(found.bytes_V) == 300 and not found.strips_space


def test_sentencepiece() -> None:
    words = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5}
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE(words, [], unk_token="<unk>", byte_fallback=True)
    found = vocabulary_of(fast(model, decoders.Sequence(steps), eos_token="</s>"), 8, stop=[6], never=[0])
    assert found.bytes_V == [None, b" a", b"b", b"\xc3", b"\xa9", b" ", None, None]
    assert found.strips_space


def test_a_tokenizer_whose_bytes_are_not_known_is_refused() -> None:
    words = {"a": 0, "##b": 1}
    with pytest.raises(ConstraintError, match="WordPiece"):
        vocabulary_of(fast(models.WordLevel(words, unk_token="a"), decoders.WordPiece()), 2, stop=[])
    tokens = vocabulary(b"a", b" .", b" ", b"b")
    check(tokens, lambda ids: b"".join(tokens.bytes_V[t] or b"" for t in ids).decode())
    with pytest.raises(ConstraintError, match="does not keep bytes"):  # a decoder that tidies spaces before points
        check(tokens, lambda ids: b"".join(tokens.bytes_V[t] or b"" for t in ids).decode().replace(" .", "."))


def test_the_cache_keeps_what_was_used_last() -> None:
    compiler = Compiler(vocabulary(b"a", b"b"), kept=2)
    first, second = compiler.compile(choice(["a"])), compiler.compile(choice(["b"]))
    assert compiler.compile(choice(["a"])) is first
    compiler.compile(choice(["a", "b"]))
    assert compiler.compile(choice(["a"])) is first
    assert compiler.compile(choice(["b"])) is not second
    small = Compiler(compiler.vocabulary, Limits(kept=first.nbytes))
    first = small.compile(choice(["a"]))
    assert small.compile(choice(["a"])) is first
    small.compile(choice(["a" * 99]))  # its bytes alone are too many
    assert small.compile(choice(["a"])) is not first


def test_what_was_refused_is_remembered() -> None:
    compiler, tokens = Compiler(vocabulary(b"a")), regex("(a|")
    errors = []
    for _ in range(2):
        with pytest.raises(ConstraintError, match="position") as raised:
            compiler.compile(tokens)
        errors.append(raised.value)
    kept = compiler.submit(tokens)
    assert kept.future.done() and isinstance(kept.future.exception(), ConstraintError)
    assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1]) == str(kept.future.exception())
    compiler.close()


def test_a_refusal_that_is_kept_does_not_keep_what_its_compilation_computed() -> None:
    compiler, event = Compiler(vocabulary(b"a")), threading.Event()
    computed = weakref.ref(event)  # the budget has it, and all frames of the compilation have the budget
    with pytest.raises(ConstraintError):
        compiler.compile(regex("(a|"), event)
    del event
    gc.collect()
    assert computed() is None


def test_a_small_constraint_overtakes_long_ones_at_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight that take long wait in turn; one that takes more than the first try is not behind them either."""
    monkeypatch.setattr("dinfer.structure.compiler.TRIES", (0.02, 0.4))
    compiler = Compiler(vocabulary(b"a", b"b"), Limits(seconds=60))
    slow = [compiler.submit(regex("(a|aa){4000}b" + "b" * i)) for i in range(8)]
    small = [compiler.submit(regex("ab")), compiler.submit(regex("(a|aa){300}b"))]
    assert [work.result(240).shortest for work in small] == [2, 301]
    assert not any(work.future.done() for work in slow)
    for work in slow:
        work.cancel()
    compiler.close()


def test_a_compilation_runs_beside_and_can_be_cancelled() -> None:
    compiler = Compiler(vocabulary(*(bytes([byte]) for byte in range(256))), Limits(seconds=60))
    kept = compiler.compile(regex("b+"))
    waiting = [compiler.submit(json_object(depth=8)), compiler.submit(regex("a+"))]
    assert compiler.submit(regex("b+")).future.done() and compiler.submit(regex("b+")).result(0) is kept
    waiting[0].cancel()
    assert waiting[1].result(240).shortest == 1
    with pytest.raises((Cancelled, CancelledError)):
        waiting[0].result(240)
    with pytest.raises(ConstraintError, match="position 0"):
        compiler.submit(regex("(")).result(240)
    compiler.close()


def test_what_takes_long_does_not_hold_up_others_and_is_cancelled_on_closing() -> None:
    compiler = Compiler(vocabulary(b"a", b"b"), Limits(seconds=60))
    slow = [compiler.submit(regex("(a|aa){4000}b" + "b" * i)) for i in range(3)]
    assert compiler.submit(regex("ab")).result(240).states == 4
    assert not any(work.future.done() for work in slow)
    compiler.close()
    slow[0].cancel()
    for work in slow:
        with pytest.raises(Cancelled):
            work.result(240)
    with pytest.raises(Cancelled):
        compiler.submit(regex("ba")).result(240)


def test_stop_strings_are_taken_out_and_a_trigger_is_waited_for() -> None:
    compiler = Compiler(vocabulary(*(bytes([byte]) for byte in range(256))))
    found = compiler.compile(regex("[ab]*", stop=("ab",))).automaton
    assert [found.accepts(text) for text in (b"ba", b"", b"bab")] == [True, True, False]
    with pytest.raises(ConstraintError, match="stop strings"):
        compiler.compile(choice(["xab", "ab"], stop=("ab",)))
    later = compiler.compile(choice(["yes"], after="</think>")).automaton
    assert [later.accepts(text) for text in (b"no <b></think>yes", b"yes", b"</think>no")] == [True, False, False]
