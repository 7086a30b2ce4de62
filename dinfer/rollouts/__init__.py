"""Rollouts for trainers: samples with what their policy did at every step."""
