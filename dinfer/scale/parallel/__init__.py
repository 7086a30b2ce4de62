"""The processes that run one model together, one for each rank: how they start, talk, watch each other, and end."""
