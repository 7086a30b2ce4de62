"""A process that dinfer starts as a rank: `python -m dinfer.scale.parallel MODULE FUNCTION PARENT PATH RANK`.

It connects with rank 0 first. Then it imports the function that does the work, which takes seconds: it needs torch.
"""

import importlib
import sys

from dinfer.scale.parallel.follower import connected

module, function, *place = sys.argv[1:]
follower = connected(*place)
vars(importlib.import_module(module))[function](follower)
