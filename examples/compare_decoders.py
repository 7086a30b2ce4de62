"""Which decoder, at which threshold? Solves the same held-out problems with each and puts the figures side by side.

python examples/compare_decoders.py [--count 50]
"""

from __future__ import annotations

import argparse
import time

import dinfer
from dinfer.demo.problems import generate, is_correct
from dinfer.lab.metrics import Sample, measure

DECODERS = [
    {"name": "fixed", "steps": 32},  # one token a forward, where blocks are of 32
    {"name": "threshold", "threshold": 0.9},
    {"name": "threshold", "threshold": 0.7},
    {"name": "hierarchical", "threshold": 0.9},
    {"name": "credit", "threshold": 0.9},
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--count", type=int, default=50, help="problems")
count = parser.parse_args().count

problems = generate("heldout", count, seed=0)
base = dinfer.load("tiny", cache="dual")
print(f"{'decoder':<28}{'accuracy':>10}{'95% interval':>18}{'NFE':>8}{'TPF':>7}")
for decoder in DECODERS:
    # The network is loaded once; a recipe around it costs nothing.
    recipe = dinfer.compose(base.model, iteration="blockwise", decoder=decoder, cache="dual")
    pipe = dinfer.Pipeline(recipe, base.tokenizer, base.engine.runtime)
    began = time.perf_counter()
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=96)
    seconds = time.perf_counter() - began
    samples = [
        Sample.of(result.counts, result.stopped, float(is_correct(problem, result.text)))
        for problem, result in zip(problems, results, strict=True)
    ]
    found = measure(samples, seconds)
    name = " ".join(map(str, decoder.values()))
    interval = f"{found.accuracy_low:.1f} to {found.accuracy_high:.1f}%"
    print(f"{name:<28}{found.accuracy:>9.1f}%{interval:>18}{found.nfe:>8.1f}{found.tpf:>7.2f}")
