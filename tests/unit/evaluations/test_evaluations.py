"""dinfer as a model of lm-eval: the scores of the direct measurement, and clear errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from support.evaluation import NEW, recipe_pipe, run
from support.models import EOS, tiny_model
from support.tokenizer import save_tokenizer
from transformers import PreTrainedTokenizerFast

import dinfer
from dinfer.core.pipeline import Pipeline
from dinfer.demo.problems import generate, is_correct
from dinfer.lab.bounds import log_likelihoods
from dinfer.lab.metrics import Sample, measure
from evaluations.adapter import DinferLM
from evaluations.settings import Likelihood


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return recipe_pipe()


def request(
    context: str, kwargs: Mapping[str, Any], doc: Mapping[str, Any] | None = None, repeats: int = 1
) -> Instance:
    return Instance("generate_until", dict(doc or {}), (context, dict(kwargs)), 0, ("task", 0, repeats))


def asked(question: str) -> str:
    return f"<|user|>{question}<|assistant|>"


def test_scores_are_those_of_the_direct_measurement(pipe: Pipeline) -> None:
    """The way of `dinfer demo` and `benchmarks.quality`, and the way through lm-eval."""
    problems = generate("heldout", 12, 0)
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=NEW)
    right = [float(is_correct(problem, result.text)) for problem, result in zip(problems, results, strict=True)]
    direct = measure([Sample.of(r.counts, r.stopped, s) for r, s in zip(results, right, strict=True)], 1.0)
    line = run(pipe)["tasks"]["mini_gsm"]
    assert 0 < sum(right) < 12, "a recipe that gets all or nothing right would show little"
    assert line["scores"]["exact_match,none"] == line["score"] == sum(right) / 12
    for name in ("problems", "correct", "accuracy", "nfe", "refreshes", "tpf", "tokens", "stopped", "tokens_to_eos",
                 "positions_per_committed"):  # fmt: skip
        assert line["metrics"][name] == direct.row()[name], name


def test_a_choice_by_likelihood(pipe: Pipeline) -> None:
    document = run(pipe, tasks=("mini_choice",), limit=3, likelihood=Likelihood(samples=4))
    line = document["tasks"]["mini_choice"]
    assert line["score"] == 1.0 and line["metrics"] is None
    assert line["likelihood"]["requests"] == 12 and line["likelihood"]["passes"] == 48
    assert document["likelihood"] == {"estimator": "masked", "samples": 4, "seed": 0, "guidance": 0.0, "greedy": True}


def test_perplexity_is_the_bound_of_the_whole_text(pipe: Pipeline) -> None:
    document = run(pipe, tasks=("mini_perplexity",), limit=2, likelihood=Likelihood(samples=3))
    texts = [problem.solution for problem in generate("heldout", 2, 0)]
    ids = [pipe.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    bounds = log_likelihoods(pipe.model, [([pipe.model.spec.eos_id], text) for text in ids], samples=3)
    bits = -sum(bound.value for bound in bounds) / sum(len(text.encode()) for text in texts) / 0.6931471805599453
    assert document["tasks"]["mini_perplexity"]["scores"]["bits_per_byte,none"] == pytest.approx(bits)


def test_long_texts_are_scored_window_by_window(pipe: Pipeline) -> None:
    text = " ".join(problem.question for problem in generate("heldout", 9, 0))
    ids = pipe.tokenizer(text, add_special_tokens=False)["input_ids"]
    limit = pipe.model.spec.max_length
    assert limit < len(ids) < 2 * limit
    lm = DinferLM(pipe, likelihood=Likelihood(samples=1))
    found = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("task", 0, 1))])
    pairs = [([lm.prefix_token_id], ids[: limit - 1]), (ids[-limit : limit - 1], ids[limit - 1 :])]
    assert found == [sum(bound.value for bound in log_likelihoods(pipe.model, pairs, samples=1))]


def test_a_gap_is_filled_with_both_sides_in_view(pipe: Pipeline) -> None:
    document = run(pipe, tasks=("mini_infill",), limit=6, max_new_tokens=None)
    line = document["tasks"]["mini_infill"]
    assert line["score"] == 1.0
    assert line["metrics"]["tokens"] <= 3, "the gap's tokens, not the text's"


def test_greedy_or_not(pipe: Pipeline) -> None:
    question = asked(generate("heldout", 1, 0)[0].question)
    slow = dinfer.compose(pipe.model, iteration="full", decoder={"name": "fixed", "steps": 64}, cache="none")
    ids = Pipeline(slow, pipe.tokenizer, dinfer.Runtime()).generate_ids(
        [pipe.tokenizer(question)["input_ids"]], max_new_tokens=8
    )
    answer = pipe.decode(ids[0].canvas[-8:])
    pairs = [(question, answer), (question, "No idea at all.")]
    requests = [Instance("loglikelihood", {}, pair, i, ("task", i, 1)) for i, pair in enumerate(pairs)]
    found = DinferLM(pipe, likelihood=Likelihood(samples=2)).loglikelihood(requests)
    assert [same for _, same in found] == [True, False] and found[0][0] > found[1][0]
    assert DinferLM(pipe, likelihood=Likelihood(samples=2, greedy=False)).loglikelihood(requests)[0][1] is False


def test_block_models_get_the_bound_of_their_blocks(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    recipe = dinfer.compose(tiny_model("block_causal"), iteration={"name": "block_diffusion", "block": 4},
                            decoder="threshold", cache="block")  # fmt: skip
    pipe = Pipeline(recipe, PreTrainedTokenizerFast.from_pretrained(tmp_path), dinfer.Runtime())
    lm = DinferLM(pipe, likelihood=Likelihood(samples=6, seed=2))
    requests = [
        Instance("loglikelihood", {}, pair, 0, ("task", 0, 1)) for pair in (("w1 w2 ", "w3 w4 w5"), ("", "w7 w8"))
    ]
    bounds = log_likelihoods(recipe.model, [([1, 2], [3, 4, 5]), ([EOS], [7, 8])], samples=6, seed=2)
    assert [value for value, _ in lm.loglikelihood(requests)] == [bound.value for bound in bounds]
    assert [answer.error for answer in lm.ledger.answers] == [bound.error for bound in bounds]
    assert lm.get_model_info()["likelihood"]["estimator"] == "masked per block of 4"
    assert lm.generate_until([request("w1 w2", {"max_gen_toks": 6})])[0]


def test_stop_strings_cut_the_text_and_the_count(pipe: Pipeline) -> None:
    question = asked(generate("heldout", 1, 0)[0].question)
    whole, short = DinferLM(pipe, max_new_tokens=NEW), DinferLM(pipe, max_new_tokens=NEW)
    text = whole.generate_until([request(question, {"until": []})])[0]
    assert short.generate_until([request(question, {"until": ["never", "\n"]})])[0] == text.split("\n")[0]
    long_, cut = whole.ledger.answers[0].sample, short.ledger.answers[0].sample
    assert long_ is not None and cut is not None
    assert cut.tokens == len(pipe.tokenizer(text.split("\n")[0])["input_ids"]) < long_.tokens
    assert cut.forwards == long_.forwards and cut.stopped


def test_knobs_of_a_task(pipe: Pipeline) -> None:
    question = asked(generate("heldout", 1, 0)[0].question)
    lm = DinferLM(pipe)
    kwargs = ({"threshold": 0.3}, {"threshold": 0.99}, {"threshold": 0.99, "max_gen_toks": 20})
    lm.generate_until(
        [Instance("generate_until", {}, (question, k), 0, (f"task{i}", 0, 1)) for i, k in enumerate(kwargs)]
    )
    few, many, short = (answer.sample for answer in lm.ledger.answers)
    assert few is not None and many is not None and short is not None
    assert few.forwards < many.forwards and short.tokens == 20 and not short.stopped


def test_answers_of_a_task_are_held_to_a_form(pipe: Pipeline) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    line = run(pipe, limit=2, max_new_tokens=24, gen_kwargs={"schema": schema})["tasks"]["mini_gsm"]
    assert line["generation_kwargs"]["schema"] == schema, "the record says it"
    lm = DinferLM(pipe)
    (text,) = lm.generate_until([request("How many?", {"regex": "[ab]{3,9}", "until": ["b"], "max_gen_toks": 12})])
    (gap,) = lm.generate_until(
        [request("Tom has ", {"infill": True, "regex": "[0-9]+", "max_gen_toks": 2}, {"suffix": " coins."})]
    )
    assert re.fullmatch("[0-9]+", gap)
    assert re.fullmatch("a{3,9}", text), "no stop string cuts what an answer is held to"


def test_repeats_differ_and_padding_does_not(pipe: Pipeline) -> None:
    """lm-eval asks for samples by repeating a request; on several ranks it pads with more of the same."""
    question = asked(generate("heldout", 1, 0)[0].question)
    lm = DinferLM(pipe, max_new_tokens=32)
    one = request(question, {"do_sample": True, "temperature": 1.5}, repeats=3)
    texts = lm.generate_until([one] * 6)
    assert len(set(texts[:3])) == 3 and texts[3:] == texts[:3]
    assert len(lm.ledger.answers) == 3


def test_temperature_of_the_recipe_and_greedy_tasks_disagree() -> None:
    hot = dinfer.load("tiny", device="cpu", sampling={"name": "standard", "temperature": 0.5})
    with pytest.raises(ValueError, match=r"task: the task asks for greedy decoding, but sampling.temperature=0.5"):
        DinferLM(hot).generate_until([request(asked("Hm?"), {"do_sample": False})])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"treshold": 0.5}, "unknown name in gen_kwargs: 'treshold'. Did you mean 'threshold'"),
        ({"num_beams": 4}, "unknown name in gen_kwargs: 'num_beams'"),
        ({"threshold": 1.5}, "threshold=1.5 must be between 0 and 1"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be an integer, at least 1"),
        ({"max_gen_toks": "many"}, "max_gen_toks='many' must be an integer"),
        ({"max_gen_toks": 1000}, "task, document 0: prompt 0: .* exceed the model's 256 positions"),
        ({"until": 3}, "until=3 must be a text or a list, each a text"),
        ({"do_sample": "yes"}, "do_sample='yes' must be true or false"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"regex": "b+", "until": ["b"]}, "task, document 0: regex: every accepted answer contains one of the stop"),
        ({"schema": {}, "regex": "b"}, "task: schema and regex are both given"),
        ({"infill": True}, "task, document 0: gen_kwargs has infill, so the document needs a text 'suffix'"),
    ],
)
def test_gen_kwargs_that_cannot_be(pipe: Pipeline, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DinferLM(pipe).generate_until([request(asked("How many?"), kwargs)])


@pytest.mark.parametrize("values", [{"samples": 0}, {"guidance": -0.5}])
def test_estimates_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"likelihood.{next(iter(values))}="):
        Likelihood(**values)


def test_options_alone_are_those_of_the_models_usual_recipe() -> None:
    """As on the command line: `decoder.threshold=0.8` does not change the decoder."""
    usual = dinfer.load("tiny-llada2").recipe
    lm = DinferLM.create_from_arg_obj({"model": "tiny-llada2", "decoder.threshold": 0.8}, {"device": "cpu"})
    assert lm.pipe.recipe.decoder == replace(usual.decoder, threshold=0.8)
    assert (lm.pipe.recipe.cache, lm.pipe.recipe.iteration) == (usual.cache, usual.iteration)


def test_arguments_of_lm_evals_command_line() -> None:
    args = {"model": "tiny", "decoder": "threshold", "decoder.threshold": 0.8, "cache": "none", "likelihood.samples": 7}
    lm = DinferLM.create_from_arg_obj(args, {"batch_size": 3, "max_batch_size": None, "device": "cpu"})
    assert lm.pipe.recipe.decoder.threshold == 0.8 and lm.likelihood.samples == 7
    assert lm.pipe.engine.runtime.rows == 3
    usual = {
        "pretrained": "tiny",
        "model.stop_ids": [3],
        "dtype": "auto",
        "trust_remote_code": True,
        "quantize": "int8",
    }
    lm = DinferLM.create_from_arg_obj(usual, {"batch_size": "auto", "device": "cpu"})
    assert 3 in lm.pipe.model.spec.stop_ids and lm.pipe.engine.runtime.rows == 32
    for wrong, message in (
        ({"decodr": "x"}, "'decodr'. Did you mean 'decoder'"),
        ({"pretrained": "tiny", "model": "tiny"}, "pretrained and model are one setting"),
        ({"mc_num": 3}, "Known: .*quantize, preset, rows"),
        ({"likelihood.x": 1}, "likelihood.x"),
    ):
        with pytest.raises(ValueError, match=message):
            DinferLM.create_from_arg_obj(wrong)
