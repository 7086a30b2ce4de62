"""Fills gaps in a text: what stands behind a gap is seen as well as what stands before it.

python examples/infill.py
"""

from __future__ import annotations

import dinfer

QUESTION = "Take the number 71, then add 124, subtract 59 and subtract 87. Which number is it?"
START = f"<|user|>{QUESTION}<|assistant|>"  # the model's own chat format: it was trained on nothing else

pipe = dinfer.load("tiny", decoder={"name": "threshold", "threshold": 0.9}, cache="none")

print("a number that only what comes behind it tells:")
filled = pipe.infill(f"{START}add 124: 71 + 124 = 195\nnow [MASK:3] - 59 = 136")
print("in the gap:", filled.gap_texts)

print("\ntwo lines, in both gaps at once:")
filled = pipe.infill(f"{START}add 124: 71 + 124 = 195\n[MASK:14]\n[MASK:13]\nAnswer: 49", trace=True)
for text in filled.gap_texts:
    print(f"  {text}")
mask = pipe.model.spec.mask_id
for forward, canvas in enumerate(filled.trace or [], 1):
    print(f"  forward {forward}: {sum(token == mask for token in canvas)} masks left")
