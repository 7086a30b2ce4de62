"""What rollouts record, and which weights made an answer."""
