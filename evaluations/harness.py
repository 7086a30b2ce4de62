"""lm-eval's own command line, with dinfer among its models and our tasks among its tasks.

    dinfer-lm-eval --model dinfer --model_args model=tiny,decoder.threshold=0.8 --tasks mini_gsm --apply_chat_template

lm-eval 0.4.13 finds no models outside itself, so `lm_eval --model dinfer` needs a script that registers ours. Later
releases find the entry point.
"""

import sys
from importlib.util import find_spec
from typing import Any

from evaluations.names import TASKS


def register() -> Any:
    """Adds dinfer to lm-eval's models, for `lm_eval.simple_evaluate(model="dinfer", ...)`.

    Returns what to give it as `task_manager`, which knows our tasks beside its own. May be called again.
    """
    import lm_eval.models  # noqa: F401  (first, since lm-eval loads its own models only while none is registered)
    from lm_eval.api.registry import MODEL_REGISTRY, register_model
    from lm_eval.tasks import TaskManager

    from evaluations.adapter import DinferLM

    if "dinfer" not in MODEL_REGISTRY:
        register_model("dinfer")(DinferLM)
    return TaskManager(include_path=str(TASKS))


def main() -> None:
    """Runs lm-eval's command line. Generated code, if allowed, runs in the sandbox."""
    if find_spec("lm_eval") is None:
        sys.exit("dinfer-lm-eval needs lm-eval: pip install 'dinfer[eval]'")
    from lm_eval.__main__ import cli_evaluate

    from dinfer.cli.terminal import reported
    from evaluations.sandbox import in_sandbox
    from evaluations.settings import Limits

    register()
    runs = len(sys.argv) > 1 and sys.argv[1] not in ("ls", "validate", "-h", "--help")
    if runs and not any(arg.partition("=")[0] == "--include_path" for arg in sys.argv):
        sys.argv += ["--include_path", str(TASKS)]
    with reported(), in_sandbox(Limits()):
        cli_evaluate()


if __name__ == "__main__":
    main()
