"""Fills gaps in a text: what stands behind a gap is seen as well as what stands before it.

python examples/infill.py
"""

from __future__ import annotations

import dinfer

pipe = dinfer.load("tiny", decoder={"name": "threshold", "threshold": 0.9}, cache="none")

text = "Tom has [MASK:1] coins and buys 3 books at 2 coins each. 6 coins are left."
filled = pipe.infill(text)
print(filled.text)
print("in the gap:", filled.gap_texts)

print("\nseveral gaps at once, the most certain positions first:")
text = "Eva has [MASK:2] cups and 4 books. [MASK:6]"
filled = pipe.infill(text, trace=True)
mask = pipe.model.spec.mask_id
for forward, canvas in enumerate(filled.trace or [], 1):
    print(f"  forward {forward}: {sum(token == mask for token in canvas)} masks left")
print(filled.text)

print("\ndrawn, each seed another one:")
for seed in range(3):
    drawn = pipe.infill(text, options={"temperature": 3.0, "seed": seed})
    print(f"  seed {seed}: {drawn.gap_texts}")
