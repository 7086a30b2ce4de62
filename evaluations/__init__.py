"""Evaluation through lm-eval: dinfer as one of its models, tasks of our own, and measurements of each run.

`dinfer eval` and `dinfer-lm-eval` call it. Needs `pip install dinfer[eval]`. Of dinfer, only the command line imports
this package.
"""
