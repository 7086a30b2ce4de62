"""Which requests can never run, and why: looked at before any work."""

from dinfer.core.engine.runtime import Runtime, pages_of
from dinfer.core.recipe.recipe import IncompatibleRecipe, Recipe, all_refusals
from dinfer.core.refusals import refused
from dinfer.core.step.request import Ask, Request, Resolved
from dinfer.core.terms.spec import ModelSpec


def check(request: Request, recipe: Recipe, runtime: Runtime) -> None:
    """Raises a ValueError that names what of the request these cannot run, and what to change."""
    check_canvas(request, recipe.model.spec)
    check_asks(request, recipe, runtime)
    need = pages_of(request, recipe, runtime.page)
    if runtime.max_length is not None and request.length > runtime.max_length:
        raise ValueError(
            f"a request of {request.length} positions exceeds runtime.max_length={runtime.max_length}: raise it, or "
            "leave it out"
        )
    if runtime.pages is not None and need > runtime.pages:
        raise ValueError(
            f"a request of {request.length} positions needs {need} pages of keys and values, and there are "
            f"{runtime.pages}: raise runtime.pages or runtime.memory, or leave it out"
        )


def check_asks(request: Request, recipe: Recipe, runtime: Runtime) -> None:
    """What the recipe that resolved its options has found to go together is not looked at again."""
    options, by, own = request.options, request.options.recipe or recipe, recipe.by_kind
    if {*options.values} - {*recipe.request_options}:
        raise ValueError(f"a request's options are of {by!r:.200}: resolve them with the recipe that runs it")
    given = {kind: part for kind, part in options.parts.items() if part is not own[kind]}
    changed = {*(given if by is not recipe else ()), *(("runtime",) if given else ())}
    changed |= {"request"} if request.asks or request.text_behind_a_gap else set()
    parts = {**own, **given, "runtime": runtime, "request": request}
    if changed and (reason := refused(all_refusals(), parts, changed)) is not None:
        raise IncompatibleRecipe(reason)
    for ask in request.asks:
        if not isinstance(ask, recipe.answers):
            raise ValueError(f"a request's asks={ask!r:.80} is answered by no ability: register one that does")
    for ability in recipe.abilities:
        if (why := ability.refusal(recipe, request)) is not None:
            raise ValueError(why)


def check_canvas(request: Request, spec: ModelSpec) -> None:
    """Raises ValueError for fields of another type or without sense."""
    tokens, open, asks = request.tokens, request.open, request.asks
    for name, value, right, what in (
        ("tokens", tokens, type(tokens) is list and {*map(type, tokens)} <= {int}, "a list of token ids (integers)"),
        ("open", open, type(open) is list and {*map(type, open)} <= {bool}, "a list of true or false for each token"),
        ("padding", request.padding, type(request.padding) is int and request.padding >= 0, "an integer, 0 or more"),
        ("stops", request.stops, type(request.stops) is bool, "true or false"),
        ("options", request.options, type(request.options) is Resolved, "what Recipe.resolve returns"),
        ("asks", asks, type(asks) is tuple and all(isinstance(one, Ask) for one in asks), "a tuple of Ask"),
    ):
        if not right:
            raise ValueError(f"a request's {name}={value!r:.80} must be {what}")
    if len({*map(type, asks)}) < len(asks):
        raise ValueError(f"a request's asks={asks!r:.80} has two of one kind: give one of each")
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if len(open) != len(tokens):
        raise ValueError(f"a request's open has {len(open)} entries for {len(tokens)} tokens: give one for each")
    if True not in open[: request.asked]:
        raise ValueError("there is nothing to decode: give new_tokens, or gaps with an open position")
    for at, token in enumerate(tokens):
        if not (open[at] or 0 <= token < spec.vocab):
            raise ValueError(f"token {token} is outside the vocabulary of {spec.vocab}")
        if not open[at] and token == spec.mask_id:
            raise ValueError(
                f"the mask token {token} stands at position {at}; a prompt is given text, and masks are put behind "
                "it or into its gaps"
            )
    if request.length > spec.max_length:
        given = open.count(False)
        room = spec.max_length - given - request.padding
        fewer = f" or ask for at most {room}" if room > 0 else ""
        raise ValueError(
            f"{given} prompt tokens and {request.asked - given} new ones exceed the model's {spec.max_length} "
            f"positions: shorten the prompt{fewer}"
        )
