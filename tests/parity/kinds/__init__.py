"""One module for each kind of file. To check another kind, add a module here; nothing else names it.

A module has

* `FILES`: where its files lie, a glob pattern below the folder of goldens;
* `takes(doc)`: whether a file is of this kind, among those that the pattern finds;
* `cases(golden, path, doc)`: what there is to check in a file. Running a case returns a remark, or raises Skip,
  Mismatch or what went wrong. `golden` knows the device, and moves networks, tensors and numbers there.
"""
