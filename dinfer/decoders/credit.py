"""Credit decoding: a token that keeps being predicted earns credit, fused into its logit (arXiv:2510.06133)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.decoders.rules import commit_above
from dinfer.protocols import BlockView, Decoder, ModelSpec, Proposal, State, TokenStats
from dinfer.registry import DECODERS, option
