"""Evaluation through lm-eval: dinfer as one of its models, tasks of our own, runs that are measured as they are judged.

`dinfer eval` and `dinfer-lm-eval` are the ways in. Needs `pip install dinfer[eval]`; nothing of dinfer but its command
line imports this package.
"""
