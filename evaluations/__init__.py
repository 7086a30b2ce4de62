"""Evaluation through lm-eval: dinfer as one of its models, our own tasks, and measurements of each run.

`dinfer eval` and `dinfer-lm-eval` call it. It needs `pip install dinfer[eval]`. In dinfer only the command line imports
this package.
"""
