"""The abilities that a step asks, in the order in which it asks them, and what cannot go together with them."""

from dinfer.core.abilities.adjusting import Adjusting, Bias, Offering
from dinfer.core.abilities.feeding import Encoder, Feeding, Following, Watching
from dinfer.core.abilities.guidance import Guidance
from dinfer.core.abilities.pacing import Editing, Holding, Pacing
from dinfer.core.abilities.reports import Reporting
from dinfer.core.refusals import Refusal, Trait
from dinfer.core.registry import values_of
from dinfer.core.step.ability import Ability
from dinfer.core.step.contracts import Decoder, Large
from dinfer.core.step.cursors import Phase
from dinfer.core.step.mixins import (
    Adjusts,
    Aligned,
    Branches,
    Edits,
    Feeds,
    Follows,
    Grows,
    LeavesDecoded,
    LeavesMasks,
    Moves,
    RecomputesEveryKey,
    RefreshesWithin,
    Slides,
    Verifies,
    Watches,
    scores_of,
)
from dinfer.research.abilities.branches import Branched
from dinfer.research.abilities.posterior import Posterior
from dinfer.research.abilities.verification import Verification
from dinfer.speed.abilities.candidates import Speculation
from dinfer.speed.abilities.open_positions import KeyPasses, OpenPositions, ReadPositions
from dinfer.speed.abilities.slices import Slices
from dinfer.structure.abilities.constraints import Constraints
from dinfer.structure.abilities.reading import Reading

ABILITIES: tuple[type[Ability], ...] = (
    Adjusting, Offering, Encoder, Branched, Speculation, Following, Holding, Feeding, Watching, Guidance, KeyPasses,
    Slices, ReadPositions, OpenPositions, Editing, Pacing, Bias, Reading, Verification, Posterior, Constraints,
    Reporting,
)  # fmt: skip


def sampled(name: str, value: str) -> Trait:
    """Sampling with an option that is not 0."""
    return Trait(
        lambda part: values_of(part).get(name, 0) != 0, f"`sampling.{name}` {value}", instead=f"sampling.{name}=0"
    )


GUIDED, HELD, EOS_LAST = sampled("guidance", "above 0"), sampled("leftmost", "above 0"), sampled("eos_last", "of 1")
NO_MASK = Trait(lambda model: model.spec.mask_id is None, "a model without a mask token")
COUNTED = Trait(lambda model: model.spec.prompt_block, "a model whose attention blocks begin behind the prompt")
CAUSAL = Trait(lambda model: model.spec.causal_block is not None, "a model that reads from left to right")
SPECULATES = Trait(lambda runtime: runtime.speculate != 0, "`runtime.speculate`", instead="runtime.speculate=0")
IN_LANGUAGE = Trait(lambda request: request.more.get("language"), "a constraint", instead="no constraint")
READ = Trait(lambda request: request.more.get("read"), "a read")
TEXT_BEHIND = Trait(lambda request: request.text_behind_a_gap, "text behind a gap", instead="gaps at the end alone")
REMEMBERS = Trait(lambda iteration: scores_of(iteration) != "none")
LOOKS_FURTHER = Trait(lambda iteration: iteration.blocks > 1 or scores_of(iteration) != "none")
PART_OF_IT = Trait(lambda iteration: iteration.block > 0 or iteration.blocks > 1, "an iteration in blocks")
ALIGNED = Trait(
    lambda iteration: isinstance(iteration, Aligned) and iteration.alignment > 1, "blocks with `align=true`"
)
LARGE = Trait(
    lambda parts: any(isinstance(x, Large) for x in parts["decoder"].fresh_state(parts["model"].spec, 1).values()),
    "a decoder that keeps large state, as over the vocabulary",
)
READS_ALL = Trait(lambda decoder: isinstance(decoder, Adjusts) or "entropy" in decoder.needs)
SEES_MASKS = Trait(lambda cache: cache.plan(Phase.WINDOW).front > 0)
KEEPS_KEYS = Trait(lambda cache: not isinstance(cache, RecomputesEveryKey))

ON_ENTRY_ALONE = Trait(
    lambda cache: not (isinstance(cache, RefreshesWithin) and cache.refreshes_within),
    "a cache that refreshes on entering a block alone",
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal("{iteration} moves on without entering a block, and {cache} refreshes keys only as a block is entered.",
            iteration=Slides, cache=ON_ENTRY_ALONE),
    Refusal("{decoder} judges decoded tokens by their logits, which {cache} does not compute.",
            cache=LeavesDecoded, decoder=Edits),
    Refusal("{cache} leaves masks out, and {decoder} would take what is not computed there for certain.",
            cache=LeavesMasks, decoder=READS_ALL),
    Refusal("{cache} computes the first masks, fed as tokens and masks, and {iteration} reads more.",
            cache=SEES_MASKS, iteration=REMEMBERS),
    Refusal("{decoder} lengthens the canvas as it decodes, so its block must span the whole generation.",
            iteration=PART_OF_IT, decoder=Grows),
    Refusal("{iteration} runs versions of the active blocks side by side, and {decoder} can follow one alone.",
            iteration=Branches, decoder=Edits | Verifies),
    Refusal("{iteration} runs versions of the active blocks side by side, and {decoder} can follow one alone.",
            iteration=Branches, decoder=Decoder, recipe=LARGE),
    Refusal("{iteration} runs versions of the active blocks side by side, and {cache} can follow one alone.",
            iteration=Branches, cache=Watches | LeavesDecoded),
    Refusal("{decoder} verifies the draft of one block, fed as tokens and masks.",
            decoder=Verifies, iteration=LOOKS_FURTHER),
    Refusal("{decoder} writes the keys of its draft, and {cache} may keep them.", decoder=Verifies, cache=KEEPS_KEYS),
    Refusal("{decoder} moves tokens, and {iteration} remembers what it expects at each position.",
            decoder=Moves, iteration=REMEMBERS),
    Refusal("{iteration} counts blocks from position 0, as align=true does, and this model counts attention blocks "
            "from the prompt's end.",
            model=COUNTED, iteration=ALIGNED),
    # Options of the sampling.
    Refusal("sampling.guidance masks the prompt in a second branch, and this model has no mask token.",
            sampling=GUIDED, model=NO_MASK),
    Refusal("{decoder} needs further lanes for one branch, and guidance takes two.", sampling=GUIDED, decoder=Verifies),
    Refusal("{iteration} needs further lanes for one branch, and guidance takes two.",
            sampling=GUIDED, iteration=Branches),
    Refusal("{cache} follows the attention of one branch, and guidance takes two.", sampling=GUIDED, cache=Follows),
    Refusal("{iteration} feeds what it expects at the masks, and a branch without the prompt would expect others.",
            sampling=GUIDED, iteration=REMEMBERS),
    Refusal("sampling.leftmost holds masks back, and {decoder} drafts all of a block.",
            sampling=HELD, decoder=Verifies | Moves),
    Refusal("sampling.leftmost holds masks back, and this model has no mask token.", sampling=HELD, model=NO_MASK),
    Refusal("{decoder} may rewrite stop tokens, so it cannot honour sampling.eos_last=1.",
            sampling=EOS_LAST, decoder=Edits),
    # Settings of the engine.
    Refusal("runtime.speculate needs a cache that recomputes the whole window in every pass, which {cache} does not.",
            cache=KEEPS_KEYS, runtime=SPECULATES),
    Refusal("runtime.speculate needs an iteration that feeds the model tokens alone. What {iteration} feeds at masks "
            "depends on the logits of the step before.",
            iteration=Feeds, runtime=SPECULATES),
    Refusal("runtime.speculate and {iteration} both fill a forward with further states.",
            iteration=Branches, runtime=SPECULATES),
    Refusal("runtime.speculate has no candidates for the second pass of {decoder}.",
            decoder=Verifies, runtime=SPECULATES),
    Refusal("runtime.speculate needs rows whose length stays, and {decoder} lengthens them.",
            decoder=Grows, runtime=SPECULATES),
    Refusal("runtime.speculate needs a model with a mask token: what open positions of this one hold changes at every "
            "step.",
            model=NO_MASK, runtime=SPECULATES),
    Refusal("sampling.guidance takes a second branch, which runtime.speculate has no candidates for.",
            sampling=GUIDED, runtime=SPECULATES),
    # What requests ask for.
    Refusal("{decoder} moves tokens or lengthens the canvas, so what it leaves could have no accepted answer.",
            decoder=Moves, request=IN_LANGUAGE),
    Refusal("{cache} leaves out open positions, so nothing can be read.", cache=LeavesMasks, request=READ),
    Refusal("there is text behind a gap, but this model reads from left to right: it would fill the gap without having "
            "seen that text.",
            model=CAUSAL, request=TEXT_BEHIND),
    Refusal("there is text behind a gap, and {decoder} moves tokens behind the prompt.",
            decoder=Moves, request=TEXT_BEHIND),
)  # fmt: skip
