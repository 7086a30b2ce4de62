"""One model on several cards, as data: which share a rank has, and how shares are summed."""
