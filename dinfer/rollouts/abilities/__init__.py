"""The ability that records rollouts."""
